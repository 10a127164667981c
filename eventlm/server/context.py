"""The state that handlers share: the engine, the tokenizer, the configuration and the running requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import structlog
from aiohttp import web

from eventlm.config import Config, ServerConfig, ServiceClass
from eventlm.config.structs import memory_bytes
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import (
    AT_SHUTDOWN,
    RECOVERY_SECONDS,
    KeyTakenError,
    ModelBusyError,
    Request,
    Submission,
)
from eventlm.errors import EventLMError, InputError, UnknownModelError
from eventlm.metrics.components import HttpRequests
from eventlm.models.facts import ModelFacts
from eventlm.sampling_params import SamplingParams
from eventlm.server.auth.api_keys import ApiKeys
from eventlm.server.errors import ApiError, api_error, body_too_large, internal_error, timed_out, unavailable
from eventlm.server.http.content_encoding import body_decoder
from eventlm.server.http.event_stream import EventStream
from eventlm.server.http.tls import Tls
from eventlm.server.request_log import error_fields, generation_fields
from eventlm.system.system import System
from eventlm.text import generation as generations
from eventlm.text.adoption import adopt, read_to_the_end
from eventlm.text.chat.request_template import RequestTemplates
from eventlm.text.decoding import validation_error
from eventlm.text.engine import Engine, EngineOfModel
from eventlm.text.forwarding.builder import ForwardingBuilder
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from eventlm.text.generation import Generation
from eventlm.text.request_builder import RequestBuilder
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import NO_FORMATS, Formats, find_formats
from eventlm.worker.fake.extras import FAKE_EMBEDDING_SIZE

_log = structlog.get_logger("eventlm.server")

#: What Ollama's clients add to a name.
LATEST_TAG = ":latest"
#: Time for the final writes of handlers whose requests were cancelled.
FINAL_WRITES_SECONDS = 5.0
#: They hold their bodies, and places in the queue of a model that others may ask for.
MAX_SHADOWS = 256
#: How often open streams send a comment while no engine is there.
COMMENT_SECONDS = 3.0


class _Named(msgspec.Struct):
    """What a body names."""

    model: Any = None


class TextOfModel(NamedTuple):
    """What requests for a model need of it. num_slots: most sequences that run at once. forwards: whether other servers
    run it.
    """

    tokenizer: Tokenizer
    defaults: SamplingParams
    facts: ModelFacts
    vocab_size: int
    num_slots: int
    forwards: bool = False


class ServerContext:
    """One server's state.

    vocab_size, facts: the model's. num_slots: most sequences that run at once. keys: those of the configuration if not
    given. classes: service classes by name. engine_pid: the engine's process, by default this one. created: unix time
    of the models, by default now. whole_config: of which `config` is a part. forwards: whether other servers run the
    model. session_key: that of all processes of the server, from which numbers of sessions are made; by default a new
    one. Raises UsageError for keys or TLS files that cannot be used, and for unknown parsers.
    """

    def __init__(
        self,
        system: System,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        *,
        defaults: SamplingParams | None = None,
        vocab_size: int | None = None,
        facts: ModelFacts = ModelFacts(FAKE_EMBEDDING_SIZE),  # noqa: B008
        num_slots: int = 256,
        keys: ApiKeys | None = None,
        classes: Mapping[str, ServiceClass] | None = None,
        engine_pid: int | None = None,
        created: int | None = None,
        whole_config: Config | None = None,
        forwards: bool = False,
        session_key: bytes = b"",
    ) -> None:
        self.whole_config = whole_config or Config(server=config)
        self.system = system
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.keys = ApiKeys(system, config) if keys is None else keys
        self.tls = Tls.of(config)
        self.classes = classes or {}
        self.defaults = defaults or SamplingParams()
        self.vocab_size = vocab_size or tokenizer.vocab_size
        self.facts = facts
        self.num_slots = num_slots
        self.forwards = forwards
        self.templates = RequestTemplates(system.processes if config.trust_request_chat_template else None)
        self._set_text()
        #: Contexts of other replicasets' models, by their names.
        self._others: dict[str, ServerContext] = {}
        self.engine_pid = engine_pid or system.processes.pid
        self.created = created or system.clock.unix_s()
        self.session_key = session_key or system.chance.token_bytes(16)
        self.draining = False
        #: Set unless the engine goes on where the one before has ended, and is not ready yet.
        self.recovered = asyncio.Event()
        self.recovered.set()
        #: How many and how long, in ns, by route, method and class of status.
        self._http_requests: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._cut = False
        self._num_running = 0
        #: The timeouts of the bodies that are being received.
        self._awaited_bodies: set[asyncio.Timeout] = set()
        #: Of the bodies of all running requests.
        self.num_body_bytes = 0
        self.max_bodies_bytes = memory_bytes(config.body_memory)
        self._idle = asyncio.Event()
        self._idle.set()
        self._live: dict[int, Generation] = {}
        #: Readers of generations whose clients are gone and may resume.
        self._read_on: set[asyncio.Task[None]] = set()
        self._shadows: set[asyncio.Task[None]] = set()
        #: Streamed replies that are being sent.
        self.open_streams: dict[EventStream, None] = {}

    def _set_text(self) -> None:
        """Set what reads and writes the model's texts. A backend finds calls and reasoning itself."""
        self.formats = NO_FORMATS if self.forwards else find_formats(self.config, self.tokenizer.chat_template)
        self.requests = (ForwardingBuilder if self.forwards else RequestBuilder)(
            self.engine,
            self.tokenizer,
            defaults=self.defaults,
            vocab_size=self.vocab_size,
            formats=self.formats,
            templates=self.templates,
        )

    def reload(self) -> None:
        """Reload files that may have changed."""
        self.keys.reload()
        if self.tls is not None:
            self.tls.reload()

    @property
    def num_running(self) -> int:
        """Requests that are generating."""
        return self._num_running

    @property
    def http_requests(self) -> HttpRequests:
        """Counts of ended HTTP requests."""
        return [(*labels, *total) for labels, total in self._http_requests.items()]

    def count_http_request(self, route: str, method: str, status: int, duration_ns: int) -> None:
        """Count an ended HTTP request."""
        labels = (route, method, f"{status // 100}xx")
        count, total_ns = self._http_requests.get(labels, (0, 0))
        self._http_requests[labels] = (count + 1, total_ns + duration_ns)

    def check_available(self) -> None:
        """Raise ApiError (503) unless requests can be taken."""
        if self.draining:
            raise unavailable("The server is shutting down; try another one or try again.")
        match self.engine.state:
            case "ready":
                return
            case "loading" if not self.recovered.is_set():
                raise unavailable("The engine has ended, and the next one goes on; try again.", code="recovering")
            case "loading":
                raise unavailable("The model is still loading; try again.")
            case "draining":
                raise unavailable("The server is draining and takes no new requests; try another one or try again.")
            case "dead":
                raise unavailable("The engine has died; see the server's log.")

    def check_loaded(self) -> None:
        """Raise ApiError (503) while it is not known yet which replies there are: another engine may have left some."""
        if self.engine.state == "loading":
            self.check_available()

    async def until_recovered(self) -> None:
        """Wait for an engine that goes on where the one before has ended, for a while."""
        if not self.recovered.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_SECONDS):
                    await self.recovered.wait()

    async def comment_until_recovered(self) -> None:
        """Let open streams say meanwhile that they go on, so that nobody on their way closes them."""
        while not self.recovered.is_set():
            for stream in self.open_streams:
                stream.comment("recovering")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMENT_SECONDS):
                    await self.recovered.wait()

    def add_model(self, names: Sequence[str], text: TextOfModel) -> None:
        """Requests may name a model of another replicaset too."""
        model = ContextOfModel(self, names[0], text)
        self._others |= dict.fromkeys(names, model)

    def of_model(self, name: str | None) -> ServerContext:
        """The context of requests for a model: this one, or that of another replicaset's model."""
        if not self._others or not name:
            return self
        return self._others.get(name) or self._others.get(name.removesuffix(LATEST_TAG)) or self

    def forwards_body(self, data: bytes) -> bool:
        """Whether other servers run the model that a body names."""
        if not self._others:
            return self.forwards
        try:
            name = msgspec.json.decode(data, type=_Named).model
        except msgspec.DecodeError:
            return False
        return self.of_model(name).forwards if isinstance(name, str | None) else False

    @property
    def knows_tokens(self) -> bool:
        """Whether the tokenizer is the model's own."""
        return not isinstance(self.tokenizer, PieceTokenizer)

    def check_knows_tokens(self) -> None:
        """Raise InputError if the tokens of the model are not known."""
        if not self.knows_tokens:
            raise InputError(
                "model",
                "The tokens of this model are not known, because other servers run it; start this one with "
                "--tokenizer PATH.",
            )

    def text_of(self, name: str) -> tuple[Tokenizer, Formats]:
        """The tokenizer of a model and its formats of tool calls and reasoning."""
        context = self.of_model(name)
        return context.tokenizer, context.formats

    @property
    def unavailable_models(self) -> list[str]:
        """Models of which no worker is up, while others are served."""
        if not self._others:
            return []
        return [name for name, model in self.engine.models.items() if not model.is_available]

    def check_model(self, name: str | None) -> ServerContext:
        """The context of requests for a model; an empty name stands for the first. Raises UnknownModelError for one
        that is not served.
        """
        if name and name not in self.engine.model_names:
            raise UnknownModelError(name)
        return self.of_model(name)

    @contextlib.asynccontextmanager
    async def time_for_a_body(self) -> AsyncIterator[None]:
        """While a body is received. Raises ApiError when it takes too long, and at the end of a drain."""
        seconds = self.config.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds) as awaited:
                self._awaited_bodies.add(awaited)
                try:
                    yield
                finally:
                    self._awaited_bodies.discard(awaited)
        except TimeoutError as error:
            if self._cut:
                raise unavailable("The server is shutting down; try another one or try again.") from error
            raise timed_out(f"The request's body did not come within {seconds} s.") from error

    async def submit(self, group: Sequence[Request], submission: Submission, *, prompt_param: str) -> Generation:
        """Submit a group. Raises ApiError, ModelBusyError if it gives way, and KeyTakenError. The generation must be
        released.
        """
        try:
            generation = await generations.submit(self.engine, self.tokenizer, group, submission, self.formats)
        except (ModelBusyError, KeyTakenError):
            raise
        except EventLMError as error:
            raise api_error(error, prompt_param=prompt_param) from error
        # The seq of the first arrival in the trace; further prompts of the body have the next ones.
        structlog.contextvars.bind_contextvars(seq=generation.handles[0].request)
        self._live[id(generation)] = generation
        if self._cut:
            generation.cancel(AT_SHUTDOWN)
        return generation

    def release(self, generation: Generation) -> None:
        """End a generation whose handler is done."""
        del self._live[id(generation)]
        generation.cancel()

    def run_on(
        self,
        generation: Generation,
        reading: Coroutine[Any, Any, ApiError | None],
        fields: Mapping[str, Any],
        started_ns: int,
    ) -> None:
        """Read a generation to its end in a task of its own, release it then, and log it. A drain waits for it.

        reading: returns the error that ended it. fields: of the request, which began at `started_ns`.
        """
        self.enter()
        task = asyncio.create_task(self._read_to_the_end(generation, reading, fields, started_ns))
        self._read_on.add(task)
        task.add_done_callback(self._read_on.discard)

    def adopt_orphans(self, engine: InferenceEngine) -> None:
        """Read on in the replies whose edges have died with their engine."""
        for reply in engine.registry.orphans():
            generation = adopt(engine, reply, self.text_of)
            self._live[id(generation)] = generation
            fields = {"recovered": reply.submission.reply_id}
            self.run_on(generation, read_to_the_end(generation), fields, engine.now_ns())

    @property
    def has_room_for_shadow(self) -> bool:
        """Whether fewer than `MAX_SHADOWS` are under way."""
        return len(self._shadows) < MAX_SHADOWS

    def run_shadow(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for; a drain does not either."""
        task = asyncio.create_task(work)
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _read_to_the_end(
        self,
        generation: Generation,
        reading: Coroutine[Any, Any, ApiError | None],
        fields: Mapping[str, Any],
        started_ns: int,
    ) -> None:
        error: ApiError | None = None
        try:
            error = await reading
        except EventLMError as failure:
            error = api_error(failure)
        except Exception:
            _log.exception("a generation without a client failed")
            error = internal_error()
        finally:
            self.leave()
            self.release(generation)
            log = _log.info if error is None or error.status < 500 else _log.warning
            log(
                "reply",
                **fields,
                duration_ms=(self.engine.now_ns() - started_ns) // 1_000_000,
                **({} if error is None else error_fields(error)),
                **generation_fields(generation, started_ns),
            )

    async def close(self) -> None:
        """End generations without a reader, and release the threads."""
        tasks = self._read_on | self._shadows
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for context in (self, *self._others.values()):
            context.requests.close()

    def enter(self) -> None:
        """A generating request begins."""
        self._num_running += 1
        self._idle.clear()

    def leave(self) -> None:
        """It is over."""
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()

    async def drain(self, cut: asyncio.Event) -> None:
        """Refuse new requests, wait for running ones until drain_seconds are over or `cut` is set, and end the rest."""
        self.draining = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, cut)]
        try:
            await asyncio.wait(waits, timeout=self.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._cut = True
        for generation in list(self._live.values()):
            generation.cancel(AT_SHUTDOWN)
        for awaited in self._awaited_bodies:
            if not awaited.expired():
                # In the past, so at once.
                awaited.reschedule(0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), FINAL_WRITES_SECONDS)


class ContextOfModel(ServerContext):
    """The context of requests for a model of another replicaset than the first: what is the server's is the first's."""

    def __init__(self, server: ServerContext, model: str, text: TextOfModel) -> None:
        self._server = server
        self.engine = cast(Engine, EngineOfModel(server.engine, model))
        self.tokenizer = text.tokenizer
        self.defaults = text.defaults
        self.vocab_size = text.vocab_size
        self.facts = text.facts
        self.num_slots = text.num_slots
        self.forwards = text.forwards
        self._set_text()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def of_model(self, name: str | None) -> ServerContext:
        return self._server.of_model(name)

    def enter(self) -> None:
        self._server.enter()

    def leave(self) -> None:
        self._server.leave()


CONTEXT = web.AppKey("context", ServerContext)
QueryT = TypeVar("QueryT", bound=msgspec.Struct)
#: The body that `read_body` has read.
BODY = web.RequestKey("body", bytes)
#: How many bytes of it were received.
BODY_BYTES = web.RequestKey("body_bytes", int)


async def read_body(request: web.Request, *, any_type: bool = False) -> bytes:
    """The decoded bytes of a JSON body. Raises ApiError for another content type or encoding, and for a body that is
    too large or too slow.

    any_type: any content type will do.

    The limit holds for the announced length and for decompressed bytes. All bodies together have a limit too; each
    counts until `release_body`. Later calls return the same bytes.
    """
    known: bytes | None = request.get(BODY)
    if known is not None:
        return known
    context = request.app[CONTEXT]
    limit = context.config.max_body_bytes
    if request.content_type != "application/json" and not any_type:
        raise ApiError(
            415, f"The Content-Type must be application/json, got '{request.headers.get('Content-Type', '')}'."
        )
    if request.content_length is not None and request.content_length > limit:
        raise body_too_large(limit)
    body = bytearray()
    try:
        async with context.time_for_a_body():
            async for chunk in _decoded_body(request):
                if len(body) + len(chunk) > limit:
                    raise body_too_large(limit)
                body += chunk
                context.num_body_bytes += len(chunk)
                request[BODY_BYTES] = len(body)
                if context.num_body_bytes > context.max_bodies_bytes:
                    raise unavailable("The server holds as many bytes of requests as it may; try again.")
    except web.RequestPayloadError as error:
        raise ApiError(400, "The request body is broken: it does not follow its Transfer-Encoding.") from error
    request[BODY] = data = bytes(body)
    return data


def read_query(request: web.Request, type_: type[QueryT]) -> QueryT:
    """The parameters of a request's query. Raises InputError."""
    try:
        return msgspec.convert(dict(request.query), type_, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), type_=type_) from error


async def _decoded_body(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it comes, decompressed. Raises ApiError for an unknown or broken Content-Encoding."""
    decoder = body_decoder(request.headers.getall("Content-Encoding", []))
    async for chunk in request.content.iter_any():
        if decoder is None:
            yield chunk
            continue
        for piece in decoder.feed(chunk):
            yield piece
            # A few bytes can become many pieces.
            await asyncio.sleep(0)
    if decoder is not None:
        decoder.end()


def release_body(request: web.Request) -> None:
    """The body of a request that is over no longer counts."""
    request.app[CONTEXT].num_body_bytes -= request.get(BODY_BYTES, 0)


def json_response(reply: Any) -> web.Response:
    """A 200 reply."""
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")
