"""What the engine keeps of live requests beside the core: token ids, parameters and output sinks.

Owns each sequence's token history and ships it to a worker that lacks the sequence; turns a worker's result into the
fact that the core may see (counts, block integers, a digest); turns decisions into outputs for the edges.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import structlog
from msgspec import structs

from eventlm.bus.token_log import PromptTokens
from eventlm.engine.backends.answers import Answers
from eventlm.engine.block_names import BlockNames, Names
from eventlm.engine.request import (
    LOGITS_NOT_FINITE,
    ClosingOutput,
    FinishedOutput,
    PooledOutput,
    PromptLogprobsOutput,
    Request,
    RequestOutput,
    TokensOutput,
)
from eventlm.engine.result_check import ResultMismatchError, check_result, wants_extras
from eventlm.engine.setup import EngineSetup
from eventlm.engine.spool.records import KeptRequest, KeptSequence, KeptWorker
from eventlm.errors import EventLMError
from eventlm.events import Arrived, Closing, Emitted, Finished, Header, Launched, Relayed, StepCompleted
from eventlm.types import SequenceId, WorkerEnd
from eventlm.worker.protocol import NewSequence, RowExtras, StepPayload, StepResult, encode

log = structlog.get_logger("eventlm.engine")

#: Gets every output of a request, or the error that ends it.
Sink = Callable[[RequestOutput | EventLMError], None]


class LiveSequence:
    """One live sequence: prompt and output ids, and how many of its blocks have names."""

    __slots__ = ("last_hash", "num_named_blocks", "num_prompt_tokens", "request", "token_ids")

    def __init__(self, request: LiveRequest, token_ids: list[int], num_named_blocks: int, last_hash: bytes) -> None:
        self.request = request
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.num_named_blocks = num_named_blocks
        self.last_hash = last_hash


class LiveRequest:
    """A request between its arrival and its last finish. Its parameters carry the seed in force."""

    __slots__ = ("cancelled_by", "error_detail", "num_unfinished", "request", "seq", "sink")

    def __init__(self, seq: int, request: Request, sink: Sink) -> None:
        self.seq = seq
        self.request = request
        self.sink = sink
        self.num_unfinished = request.n
        #: `FinishedOutput.detail` if the request ends with an `error`.
        self.error_detail = ""
        #: The reason of its cancel.
        self.cancelled_by = ""

    def fail(self, error: EventLMError) -> None:
        """Put the last output into its sink. What the sink raises is ignored: no other output could follow."""
        sink, self.sink = self.sink, ignore_output
        with contextlib.suppress(Exception):
            sink(error)


class Output(NamedTuple):
    """Something that a client may see once its fact is written. `ended`: the sequence, if that is its end."""

    request: LiveRequest
    output: RequestOutput
    ended: SequenceId | None = None


class _Worker:
    """What a replica's worker of this epoch holds, and its launches that are not completed, oldest first. It has
    answered the first `num_answered` of them; those completions are not applied yet.
    """

    __slots__ = ("epoch", "held", "launches", "num_answered")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.held: set[SequenceId] = set()
        self.launches: deque[Launched] = deque()
        self.num_answered = 0


class _Completing(NamedTuple):
    """The step whose completion is being applied: its rows, their tokens, and the extras by row."""

    rows: list[SequenceId]
    tokens: list[list[int]]
    extras: dict[int, RowExtras]

    @classmethod
    def of(cls, launched: Launched | None, tokens: list[list[int]], extras: Sequence[RowExtras]) -> _Completing:
        """launched: None if nobody waits for it any more."""
        rows = [] if launched is None else _rows(launched)
        return cls(rows, tokens if launched is not None else [], {each.row: each for each in extras})


class ServedModel(NamedTuple):
    """What a replicaset's requests need: by which names they call for it, and what its blocks and tokens are.

    first_replica: the number of its first replica. vocab_size: 0: unknown, so any token id is accepted.
    """

    models: Sequence[str]
    names: BlockNames
    block_size: int
    vocab_size: int = 0
    first_replica: int = 0


class LiveRequests:
    """All live requests of an engine. `seed_key` makes the seeds of requests without one. `vocab_size` 0: unknown, so
    any token id is accepted. others: the further replicasets, in their order.
    """

    def __init__(
        self,
        names: BlockNames,
        *,
        block_size: int,
        seed_key: bytes,
        digest_key: bytes,
        vocab_size: int = 0,
        others: Sequence[ServedModel] = (),
    ) -> None:
        self._sets = [ServedModel((), names, block_size, vocab_size), *others]
        #: Of the further ones. What is for none of them is for the first.
        self._set_numbers = {model: index for index, each in enumerate(others, start=1) for model in each.models}
        self._first_replicas = [each.first_replica for each in self._sets]
        self._seed_key = seed_key
        self.digest_key = digest_key
        self._requests: dict[int, LiveRequest] = {}
        #: Those whose rows give more than tokens.
        self._asking: set[int] = set()
        #: Sequences that take tokens: neither closing nor finished.
        self._samples: dict[SequenceId, LiveSequence] = {}
        #: By replica.
        self._workers: dict[int, _Worker] = {}
        self._completing = _Completing([], [], {})
        #: Of those that are forwarded to other servers.
        self.answers = Answers()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, seq: int) -> bool:
        return seq in self._requests

    def fail(self, error: EventLMError) -> None:
        """The engine cannot go on: end all requests with this error, in order of arrival."""
        requests, self._requests = self._requests, {}
        self._samples.clear()
        self._asking.clear()
        for live in requests.values():
            live.fail(error)

    def arrive(self, seq: int, request: Request, sink: Sink, *, group_size: int, group_index: int) -> Arrived:
        """Take a request in as number `seq`; returns its fact, which holds none of its content."""
        seed = self._draw_seed(seq) if request.sampling.seed is None else request.sampling.noise_seed
        root = self._root(request)
        names = self._names_of(request).extend(root, request.prompt_token_ids)
        self._take_in(seq, request, seed, sink, names)
        return Arrived(
            prompt_tokens=len(request.prompt_token_ids),
            blocks=names.integers,
            n=request.n,
            max_tokens=request.max_tokens,
            scheduling=request.scheduling,
            group_size=group_size,
            group_index=group_index,
            seed=str(seed),
            replicaset=self._set_numbers.get(request.scheduling.model, 0),
        )

    def arrive_again(self, fact: Arrived, request: Request, sink: Sink) -> None:
        """Take a request in as a log has it."""
        last_hash = self._names_of(request).learn(self._root(request), request.prompt_token_ids, fact.blocks)
        self._take_in(fact.s, request, int(fact.seed), sink, Names(fact.blocks, last_hash))

    def _take_in(self, seq: int, request: Request, seed: int, sink: Sink, names: Names) -> None:
        request = structs.replace(request, sampling=request.sampling.for_worker(seed))
        live = LiveRequest(seq, request, sink)
        self._requests[seq] = live
        self.answers.add(seq, request)
        if wants_extras(request):
            self._asking.add(seq)
        for index in range(request.n):
            sample = LiveSequence(live, list(request.prompt_token_ids), len(names.integers), names.last_hash)
            self._samples[SequenceId(seq, index)] = sample

    def _names_of(self, request: Request) -> BlockNames:
        return self._sets[self._set_numbers.get(request.scheduling.model, 0)].names

    def _root(self, request: Request) -> bytes:
        scheduling = request.scheduling
        return self._names_of(request).root(scheduling.model, scheduling.adapter, request.cache_salt)

    def _of_replica(self, replica: int) -> ServedModel:
        return self._sets[bisect_right(self._first_replicas, replica) - 1]

    def fail_request(self, seq: int, error: EventLMError) -> None:
        """End one request with this error; nothing if it has left. It must be cancelled."""
        if seq in self._requests:
            self._requests[seq].fail(error)

    def fail_set(self, number: int, error: EventLMError) -> list[int]:
        """A replicaset cannot go on: end its requests with this error. Returns them; they must be cancelled."""
        failed = []
        for seq, live in self._requests.items():
            if self._set_numbers.get(live.request.scheduling.model, 0) == number:
                live.fail(error)
                failed.append(seq)
        return failed

    def prompt_tokens(self, seq: int) -> PromptTokens:
        """The token log's line of a request that has just arrived; `recorded_request` reverses it."""
        request = self._requests[seq].request
        salt = request.cache_salt.encode()
        return PromptTokens(
            s=seq,
            token_ids=request.prompt_token_ids,
            params=structs.replace(request.sampling, seed=None),
            # A client's salt is only ever compared for equality.
            cache_salt=blake2b(salt, digest_size=16, key=self.digest_key).hexdigest() if salt else "",
        )

    def awaited_grammar(self, seq: int) -> str:
        """The grammar that a request waits for, empty if none."""
        request = self._requests[seq].request
        return request.sampling.grammar if request.scheduling.waits_for_grammar else ""

    def grammar(self, seq: int) -> str:
        """The grammar that a request follows, empty if none."""
        return self._requests[seq].request.sampling.grammar

    def fail_grammar(self, seq: int, detail: str) -> None:
        """Set the error that the client of a live request gets if its grammar cannot be built."""
        self._requests[seq].error_detail = detail

    def cancel(self, seq: int, reason: str) -> None:
        """Set the reason that the client of a request gets when its cancel is applied; nothing if it has left."""
        if seq in self._requests:
            self._requests[seq].cancelled_by = reason

    def num_output_tokens(self, identity: SequenceId) -> int | None:
        """How many tokens a sequence has been given; None once it takes no more."""
        sample = self._samples.get(identity)
        return None if sample is None else len(sample.token_ids) - sample.num_prompt_tokens

    def _draw_seed(self, seq: int) -> int:
        digest = blake2b(str(seq).encode(), digest_size=8, key=self._seed_key).digest()
        return int.from_bytes(digest, "little")

    def keep(self, seq: int) -> KeptRequest:
        """All of a live request that another engine needs."""
        live = self._requests[seq]
        names = [SequenceId(seq, index) for index in range(live.request.n)]
        return KeptRequest(
            seq,
            live.request,
            live.num_unfinished,
            live.error_detail,
            live.cancelled_by,
            [
                KeptSequence(
                    identity.index,
                    sample.token_ids[sample.num_prompt_tokens :],
                    sample.num_named_blocks,
                    sample.last_hash,
                )
                for identity in names
                if (sample := self._samples.get(identity)) is not None
            ],
            self.answers.keep(names),
        )

    @property
    def requests(self) -> Iterable[int]:
        """The seqs of all, in order of arrival."""
        return self._requests

    def keep_names(self) -> list[tuple[bytes, int]]:
        """Of each replicaset, the key of its block names and the next integer."""
        return [(each.names.key, each.names.next_integer) for each in self._sets]

    def keep_workers(self) -> list[KeptWorker]:
        """The launches that are under way."""
        return [KeptWorker(replica, worker.epoch, [*worker.launches]) for replica, worker in self._workers.items()]

    def restore(self, kept: KeptRequest, sink: Sink) -> None:
        """Take a live request over from another engine."""
        seq, request = kept.seq, kept.request
        live = self._requests[seq] = LiveRequest(seq, request, sink)
        live.num_unfinished, live.error_detail = kept.num_unfinished, kept.error_detail
        live.cancelled_by = kept.cancelled_by
        if wants_extras(request):
            self._asking.add(seq)
        for each in kept.sequences:
            sample = LiveSequence(live, list(request.prompt_token_ids), each.num_named_blocks, each.last_hash)
            sample.token_ids += each.token_ids
            self._samples[SequenceId(seq, each.index)] = sample
        self.answers.restore(seq, kept.answers)

    def carry(self, kept: KeptRequest, arrival: Arrived, sink: Sink) -> Arrived:
        """Take a live request over from another run, in which models and blocks had other numbers. Returns its arrival
        as it would be in this one. What it has produced gets its names once a worker has it.
        """
        request = kept.request
        names = self._names_of(request).extend(self._root(request), request.prompt_token_ids)
        named = [
            structs.replace(each, num_named_blocks=len(names.integers), last_hash=names.last_hash)
            for each in kept.sequences
        ]
        self.restore(structs.replace(kept, sequences=named), sink)
        number = self._set_numbers.get(request.scheduling.model, 0)
        return structs.replace(arrival, blocks=names.integers, replicaset=number)

    def restore_worker(self, kept: KeptWorker) -> None:
        """Take a worker's launches over from another engine."""
        worker = self._workers[kept.replica] = _Worker(kept.epoch)
        worker.launches.extend(kept.launches)

    def reject(self, seq: int) -> None:
        """Forget a request that was not admitted."""
        live = self._requests.pop(seq)
        self._asking.discard(seq)
        for index in range(live.request.n):
            del self._samples[SequenceId(seq, index)]
            self.answers.forget(SequenceId(seq, index))

    def launch(self, launched: Launched) -> StepPayload:
        """What the worker needs beside the launch: the sequences in it that the worker does not hold."""
        worker = self._workers.setdefault(launched.replica, _Worker(launched.epoch))
        held = worker.held
        held.difference_update(SequenceId(*pair) for pair in launched.forget)
        worker.launches.append(launched)
        new = []
        for row in launched.chunks:
            identity = SequenceId(row[0], row[1])
            if identity not in held:
                held.add(identity)
                new.append(self._describe(identity))
        return StepPayload(new=new)

    def _describe(self, identity: SequenceId) -> NewSequence:
        sample = self._samples[identity]
        return NewSequence(
            request=identity.request,
            index=identity.index,
            token_ids=list(sample.token_ids),
            num_prompt_tokens=sample.num_prompt_tokens,
            params=sample.request.request.sampling,
            kind=sample.request.request.scheduling.kind,
        )

    def set_worker(self, replica: int, epoch: int | None) -> None:
        """The replica's worker is that of this epoch, or there is none. An earlier one is gone with what it held."""
        worker = self._workers.get(replica)
        if worker is not None and worker.epoch != epoch:
            del self._workers[replica]

    def answer(self, replica: int, result: StepResult) -> None:
        """Take in a worker's answer. `complete` applies answers in their order.

        Raises ResultMismatchError if it does not answer the worker's oldest open launch.
        """
        worker = self._workers.get(replica)
        if worker is None or worker.num_answered == len(worker.launches):
            raise ResultMismatchError(f"a result of step {result.step}, and no step is under way")
        launched = worker.launches[worker.num_answered]
        asking: list[tuple[int, Request]] = []
        if self._asking:
            asking = [
                (row, sample.request.request)
                for row, identity in enumerate(_rows(launched))
                if identity.request in self._asking and (sample := self._samples.get(identity)) is not None
            ]
        check_result(result, launched, asking, vocab_size=self._of_replica(replica).vocab_size)
        worker.num_answered += 1

    def complete(
        self, replica: int, result: StepResult, *, start_ns: int, end_ns: int, stages: Sequence[tuple[int, int]] = ()
    ) -> StepCompleted:
        """The fact of a worker's result. Its tokens are kept until the core decides which of them count."""
        launched = self._take_launch(replica, result.epoch)
        filled: list[tuple[int, list[int]]] = []
        if launched is not None:
            filled = self._name_filled(launched, result.tokens)
            for identity in self._note_errors(launched, result.ends, result.tokens):
                log.warning(
                    "the model computed NaN or infinity for a request, which fails: are the weights damaged, "
                    "or is their dtype too narrow (--dtype float32)?",
                    request=identity.request,
                    index=identity.index,
                    step=result.step,
                )
        self._completing = _Completing.of(launched, result.tokens, result.extras)
        return StepCompleted(
            c=launched.s if launched is not None else 0,
            replica=replica,
            epoch=result.epoch,
            step=result.step,
            start_ns=start_ns,
            end_ns=end_ns,
            digest=self.digest(result.tokens),
            produced=list(map(len, result.tokens)),
            ends=result.ends,
            filled=filled,
            stages=list(stages),
        )

    def complete_again(self, fact: StepCompleted, tokens: list[list[int]], extras: Sequence[RowExtras]) -> None:
        """Complete a step as a log has it."""
        launched = self._take_launch(fact.replica, fact.epoch)
        if launched is not None:
            rows = _rows(launched)
            for row, integers in fact.filled:
                sample = self._samples[rows[row]]
                content = self._filled(sample, launched, row, tokens[row])
                names = self._of_replica(launched.replica).names
                sample.last_hash = names.learn(sample.last_hash, content, integers)
                sample.num_named_blocks += len(integers)
            self._note_errors(launched, fact.ends, tokens)
        self._completing = _Completing.of(launched, tokens, extras)

    def requests_of_step(self, fact: StepCompleted) -> set[int]:
        """The requests that a step which is about to be completed may have something for."""
        worker = self._workers.get(fact.replica)
        if worker is None or worker.epoch != fact.epoch:
            return set()
        rows = zip(_rows(worker.launches[0]), fact.produced, strict=True)
        return {identity.request for identity, num_tokens in rows if num_tokens or identity.request in self._asking}

    def _take_launch(self, replica: int, epoch: int) -> Launched | None:
        """The launch that a result answers; None if its worker is lost."""
        worker = self._workers.get(replica)
        if worker is None or worker.epoch != epoch:
            return None
        worker.num_answered = max(worker.num_answered - 1, 0)
        return worker.launches.popleft()

    def _note_errors(
        self, launched: Launched, ends: Sequence[tuple[int, WorkerEnd]], tokens: list[list[int]]
    ) -> list[SequenceId]:
        """Note which rows ended because their logits were not finite. Some rows may have left by now."""
        rows = _rows(launched)
        failed = [rows[row] for row, end in ends if end == "error" and not tokens[row] and rows[row] in self._samples]
        for identity in failed:
            self._samples[identity].request.error_detail = LOGITS_NOT_FINITE
        return failed

    def digest(self, tokens: list[list[int]]) -> str:
        """The digest of a step's tokens in its fact."""
        return blake2b(encode(tokens), digest_size=8, key=self.digest_key).hexdigest()

    def _name_filled(self, launched: Launched, tokens: list[list[int]]) -> list[tuple[int, list[int]]]:
        """(row, integers) of the blocks whose last token's KV the step has stored."""
        served = self._of_replica(launched.replica)
        filled = []
        for row, identity in enumerate(_rows(launched)):
            sample = self._samples.get(identity)
            if sample is None:
                continue
            content = self._filled(sample, launched, row, tokens[row])
            if not content:
                continue
            names = served.names.extend(sample.last_hash, content)
            sample.last_hash = names.last_hash
            sample.num_named_blocks += len(names.integers)
            filled.append((row, names.integers))
        return filled

    def _filled(self, sample: LiveSequence, launched: Launched, row: int, tokens: list[int]) -> list[int]:
        """The tokens after a sequence's named blocks whose KV is stored once a row of a launch is completed; none if
        they fill no block.

        A decode stores the KV of the last confirmed token and of all it produced but the last; a chunk that of its
        own tokens, and where it produced several, of all of those but the last.
        """
        num_decodes = len(launched.decodes)
        if row < num_decodes:
            stored = len(sample.token_ids) + len(tokens) - 1
        else:
            _, _, start, num_tokens, _ = launched.chunks[row - num_decodes]
            stored = start + num_tokens + max(len(tokens) - 1, 0)
        size = self._of_replica(launched.replica).block_size
        first = sample.num_named_blocks * size
        if stored - first < size:
            return []
        return (sample.token_ids[first:] + tokens)[: stored - first]

    def emit(self, emitted: Emitted) -> list[Output]:
        """Append the tokens of the step just completed, except those that the core dropped."""
        rows, tokens, extras = self._completing
        dropped = dict(emitted.dropped)
        outputs = []
        for row, (identity, produced) in enumerate(zip(rows, tokens, strict=True)):
            if row in extras:
                outputs += self._prompt_outputs(identity, extras[row])
            if not produced or row in dropped:
                continue
            sample = self._samples[identity]
            start = len(sample.token_ids) - sample.num_prompt_tokens
            sample.token_ids += produced
            logprobs = extras[row].logprobs if row in extras else None
            outputs.append(Output(sample.request, TokensOutput(identity.index, start, produced, logprobs)))
        return outputs

    def relay(self, relayed: Relayed) -> list[Output]:
        """What other servers have just streamed, except what the core dropped."""
        return [Output(self._samples[identity].request, output) for identity, output in self.answers.relay(relayed)]

    def _prompt_outputs(self, identity: SequenceId, extras: RowExtras) -> list[Output]:
        """Put out what a row says of its prompt; nothing if the client has left."""
        sample = self._samples.get(identity)
        if sample is None:
            return []
        found: list[RequestOutput] = []
        if extras.prompt_logprobs is not None:
            found.append(PromptLogprobsOutput(identity.index, extras.prompt_start, extras.prompt_logprobs))
        if extras.embedding:
            found.append(PooledOutput(identity.index, extras.embedding))
        return [Output(sample.request, output) for output in found]

    def start_closing(self, closing: Closing) -> Output:
        """A sequence takes no more tokens; its edge owes the end of its text."""
        sample = self._samples.pop(SequenceId(closing.request, closing.index))
        return Output(sample.request, ClosingOutput(closing.index, closing.reason, closing.position))

    def finish(self, finished: Finished) -> Output:
        """A sequence is over, and with the last one its request."""
        seq = finished.request
        live = self._requests[seq]
        identity = SequenceId(seq, finished.index)
        self._samples.pop(identity, None)
        live.num_unfinished -= 1
        if not live.num_unfinished:
            del self._requests[seq]
            self._asking.discard(seq)
        detail = {"error": live.error_detail, "cancelled": live.cancelled_by}.get(finished.reason, "")
        output = FinishedOutput(
            finished.index, finished.reason, finished.position, finished.cached_tokens, detail=detail
        )
        return Output(live, self.answers.finish(identity, output), ended=identity)


def make_live(
    header: Header, setups: Sequence[EngineSetup], *, block_names: Sequence[tuple[bytes, int]], digest_key: bytes
) -> LiveRequests:
    """The live requests of a run. block_names: of each replicaset, the key and the next integer."""
    first, *others = [
        ServedModel(
            setup.core.models,
            BlockNames(key, block_size=setup.core.block_size, capacity=record.block_table_size, next_integer=integer),
            setup.core.block_size,
            setup.vocab_size,
            setup.first_replica,
        )
        for setup, record, (key, integer) in zip(setups, header.sets, block_names, strict=True)
    ]
    return LiveRequests(
        first.names,
        block_size=first.block_size,
        seed_key=int(header.seeds["requests"]).to_bytes(8, "little"),
        digest_key=digest_key,
        vocab_size=first.vocab_size,
        others=others,
    )


def ignore_output(output: RequestOutput | EventLMError) -> None:
    """The sink of a request that has failed or that no client can read."""


def _rows(launched: Launched) -> list[SequenceId]:
    """The sequences of a launch, in the order of its rows."""
    rows = [SequenceId(row[0], row[1]) for row in launched.decodes]
    return rows + [SequenceId(row[0], row[1]) for row in launched.chunks]
