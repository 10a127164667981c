"""Finds out by asking which kind of server a backend is, what it serves and how much it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from eventlm.config.backends import BackendKind, BackendSpec
from eventlm.engine.backend import BackendError, BackendFacts
from eventlm.gateway.counts import count_of
from eventlm.gateway.load import parse_cache_tokens

#: Gets a path below the server's root. Raises BackendError.
Get = Callable[[str], Awaitable[bytes]]
PageT = TypeVar("PageT", bound=Struct)

_MODELS, _METRICS = "/v1/models", "/metrics"
#: Shown of the names of a backend that serves many models.
_MAX_NAMES = 8


class Discovered(Struct, frozen=True):
    """What a backend is, and the name that it has for the model."""

    facts: BackendFacts
    model: str


class _Meta(Struct, frozen=True):
    n_ctx: int = 0


class _Model(Struct, frozen=True):
    """`root` is what the name stands for, `parent` of an adapter what it adapts, as in vLLM. `meta` is llama.cpp's."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _ModelList(Struct, frozen=True):
    data: list[_Model]


class _Version(Struct, frozen=True):
    """`/version` of vLLM and eventlm, `/api/version` of Ollama. `server_id` is eventlm's."""

    version: str
    server_id: str = ""


class _Settings(Struct, frozen=True):
    n_ctx: int


class _Props(Struct, frozen=True):
    """`/props` of llama.cpp and eventlm. `n_ctx` is that of one slot."""

    total_slots: int
    default_generation_settings: _Settings
    build_info: str = ""


class _Scheduler(Struct, frozen=True):
    effective_max_running_requests_per_dp: int = 0


class _ServerInfo(Struct, frozen=True):
    """`/server_info` of SGLang, with a scheduler for each rank of data parallelism."""

    max_total_num_tokens: int
    internal_states: list[_Scheduler] = []
    version: str = ""


class _Pages(Struct, frozen=True):
    """What a backend answers of the pages that it was asked for; None: nothing of that form."""

    version: _Version | None = None
    props: _Props | None = None
    info: _ServerInfo | None = None
    ollama: _Version | None = None

    @property
    def kind(self) -> BackendKind:
        """eventlm has pages of llama.cpp's, vLLM's and Ollama's, and SGLang may have Ollama's."""
        if (self.version is not None and self.version.server_id) or self._is_built_by_eventlm:
            return "eventlm"
        if self.props is not None:
            return "llamacpp"
        if self.info is not None:
            return "sglang"
        if self.version is not None:
            return "vllm"
        return "openai" if self.ollama is None else "ollama"

    @property
    def _is_built_by_eventlm(self) -> bool:
        return self.props is not None and self.props.build_info.startswith("eventlm-")


async def ask(spec: BackendSpec, get: Get) -> Discovered:
    """Ask a backend. A kind that is given is not doubted. Raises BackendError."""
    models = _decode(spec, await get(_MODELS))
    pages = await _pages(spec.kind, get)
    kind = spec.kind or pages.kind
    model = _choose(spec, kind, models)
    metrics = await _or_nothing(get, _METRICS) if kind in ("vllm", "eventlm") else b""
    version, slots, cache_tokens = "", 0, parse_cache_tokens(metrics)
    if pages.version is not None:
        version = pages.version.version
    if pages.props is not None:
        slots = pages.props.total_slots
        if kind == "llamacpp":
            version = pages.props.build_info
            # A prompt that a slot still holds is not computed again.
            cache_tokens = slots * pages.props.default_generation_settings.n_ctx
    if pages.info is not None:
        version, cache_tokens = pages.info.version, pages.info.max_total_num_tokens
        slots = sum(each.effective_max_running_requests_per_dp for each in pages.info.internal_states)
    if pages.ollama is not None and kind == "ollama":
        version = pages.ollama.version
    facts = BackendFacts(
        kind=kind,
        version=version,
        models=[each.id for each in models],
        max_model_len=count_of(_max_model_len(model, pages), unknown=0),
        max_concurrency=count_of(slots, unknown=0),
        cache_tokens=count_of(cache_tokens, unknown=0),
        server_id=pages.version.server_id if pages.version is not None else "",
    )
    return Discovered(facts, spec.model or model.id)


def _decode(spec: BackendSpec, body: bytes) -> list[_Model]:
    url = f"{spec.url}{_MODELS}"
    try:
        models = msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{url} did not answer with a list of models; is it an OpenAI-compatible server?"
        raise BackendError(message, "protocol") from error
    if not models:
        raise BackendError(f"{url} names no model; load one there", "protocol")
    return models


def _choose(spec: BackendSpec, kind: BackendKind, models: list[_Model]) -> _Model:
    """The model that is meant. Raises BackendError if that is not clear."""
    names = [model.id for model in models]
    if spec.model:
        # Ollama's names have a tag, of which `latest` may be left out; llama.cpp takes any name for its one model.
        for model in models:
            if model.id in (spec.model, f"{spec.model}:latest"):
                return model
        if kind == "llamacpp" and len(models) == 1:
            return models[0]
        raise BackendError(f"{spec.url} does not serve {spec.model!r}; it serves {_in_words(names)}", "refused")
    own = [model for model in models if model.parent is None]
    if len({model.root or model.id for model in own}) > 1 and kind != "eventlm":
        raise BackendError(f"{spec.url} serves several models; name one with model=NAME: {_in_words(names)}", "refused")
    return (own or models)[0]


def _max_model_len(model: _Model, pages: _Pages) -> int:
    if model.max_model_len:
        return model.max_model_len
    if pages.props is not None:
        return pages.props.default_generation_settings.n_ctx
    return model.meta.n_ctx if model.meta is not None else 0


async def _pages(kind: BackendKind | None, get: Get) -> _Pages:
    version, props, info, ollama = await asyncio.gather(
        _page(get, "/version", _Version, is_asked=kind in (None, "vllm", "eventlm")),
        _page(get, "/props", _Props, is_asked=kind in (None, "llamacpp", "eventlm")),
        _page(get, "/server_info", _ServerInfo, is_asked=kind in (None, "sglang")),
        _page(get, "/api/version", _Version, is_asked=kind in (None, "ollama")),
    )
    if info is None and (kind == "sglang" or (kind is None and version is None and props is None)):
        # Its name in older versions of SGLang.
        info = await _page(get, "/get_server_info", _ServerInfo, is_asked=True)
    return _Pages(version, props, info, ollama)


async def _page(get: Get, path: str, type_: type[PageT], *, is_asked: bool) -> PageT | None:
    if not is_asked:
        return None
    try:
        return msgspec.json.decode(await _or_nothing(get, path), type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _or_nothing(get: Get, path: str) -> bytes:
    """A page that not every server has. Raises BackendError where there is no answer at all."""
    try:
        return await get(path)
    except BackendError as error:
        if error.status:
            return b""
        raise


def _in_words(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
