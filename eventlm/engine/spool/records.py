"""What a spool holds, as msgpack: first all that lived when its segment began, then what came in with each drain.

The log has lengths, names and reasons; a record has the tokens and texts that belong to the fact `s`.
"""

from __future__ import annotations

from typing import Union

import msgspec
from msgspec import Struct

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AttemptId, BackendFailure
from eventlm.engine.backends.answers import Answer
from eventlm.engine.request import Request, Submission
from eventlm.events import Launched
from eventlm.worker.protocol import RowExtras

SPOOL_FORMAT = 1


class ArrivalRecord(Struct, frozen=True, tag="submitted", array_like=True):
    """A group came in; `s` is the arrival of its first request."""

    s: int
    group: list[Request]
    submission: Submission | None = None


class StepRecord(Struct, frozen=True, tag="computed", array_like=True):
    """What a step produced, as StepResult has it."""

    s: int
    tokens: list[list[int]]
    extras: list[RowExtras] = []


class DeltasRecord(Struct, frozen=True, tag="went_on", array_like=True):
    """How answers of other servers went on."""

    s: int
    deltas: list[tuple[AttemptId, list[AnswerDelta]]]


class AnswerEndRecord(Struct, frozen=True, tag="answer_ended", array_like=True):
    """How an answer of another server ended."""

    s: int
    ended: AnswerEnd


class FailureRecord(Struct, frozen=True, tag="attempt_failed", array_like=True):
    """Why an attempt at another server failed."""

    s: int
    failure: BackendFailure


class GrammarErrorRecord(Struct, frozen=True, tag="grammar_failed", array_like=True):
    """Why the grammar of a request cannot be built."""

    s: int
    detail: str


class DropRecord(Struct, frozen=True, tag="reply_dropped", array_like=True):
    """Its owner had a reply deleted."""

    reply_id: str


Record = Union[ArrivalRecord, StepRecord, DeltasRecord, AnswerEndRecord, FailureRecord, GrammarErrorRecord, DropRecord]  # noqa: UP007


class DrainRecords(Struct, frozen=True, tag="drain", array_like=True):
    """The records of one drain, in the order of its facts."""

    records: list[Record]


class KeptSequence(Struct, frozen=True, array_like=True):
    """A sequence that takes tokens: its output so far, and of its blocks how many have names and the hash of the last
    of these.
    """

    index: int
    token_ids: list[int]
    num_named_blocks: int
    last_hash: bytes


class KeptRequest(Struct, frozen=True, array_like=True):
    """A live request, as LiveRequests has it. answers: of a forwarded one, by the index of the sequence."""

    seq: int
    request: Request
    num_unfinished: int
    error_detail: str
    cancelled_by: str
    sequences: list[KeptSequence]
    answers: list[tuple[int, Answer]]


class KeptReply(Struct, frozen=True, tag="reply", array_like=True):
    """A reply, as the registry has it, and its live requests. A request of no reply is alone, and `submission` None.

    rewinds: as ResumedReply has them.
    """

    live: list[KeptRequest]
    submission: Submission | None = None
    group: list[Request] = []
    requests: list[int] = []
    samples: list[int] = []
    outputs: list[bytes] | None = None
    num_unfinished: int = 0
    num_branches: int = 0
    rewinds: list[int] = []


class KeptWorker(Struct, frozen=True, array_like=True):
    """A replica's worker, and its launches that are not completed, oldest first."""

    replica: int
    epoch: int
    launches: list[Launched]


class SpoolHead(Struct, frozen=True, kw_only=True, tag="head", array_like=True):
    """The first frame of a spool.

    trace: where the run is recorded. boot_id: of the host; empty: not known. origin_ns: the time on its monotonic clock
    at which the run's clock is 0. block_names: of each replicaset, the key and the next integer. num_recoveries: how
    often an engine has died in this run. outputs_wait_for_syncs: whether none is lost in a power failure.
    """

    format: int = SPOOL_FORMAT
    run: str
    trace: str
    first_s: int
    boot_id: str
    origin_ns: int
    digest_key: bytes
    block_names: list[tuple[bytes, int]]
    workers: list[KeptWorker]
    num_recoveries: int = 0
    outputs_wait_for_syncs: bool = False


Frame = Union[SpoolHead, KeptReply, DrainRecords]  # noqa: UP007
encode_frame = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame)


def decode_frame(body: bytes) -> Frame:
    """The frame of a body. Raises msgspec.DecodeError for what is none."""
    frame: Frame = _decode.decode(body)
    return frame
