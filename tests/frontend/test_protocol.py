from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.config import Config, ServerConfig
from eventlm.config.backends import BackendSpec
from eventlm.engine.admin import SwapPolicy
from eventlm.engine.backend import AnswerDelta, AnswerUsage, BackendFailure, CallPart, ForwardedRequest
from eventlm.engine.backends.actions import AddBackend
from eventlm.engine.object_store.actions import (
    ChangeObject,
    DuplicateItemError,
    GetItem,
    ObjectHeldError,
    ObjectStoreError,
    ObjectTooLargeError,
    PutObject,
    StoredItem,
    UnknownObjectError,
)
from eventlm.engine.rate_limits import BucketState, RateLimitError, RateLimits, RateLimitState
from eventlm.engine.request import (
    ClosingOutput,
    ContextLengthError,
    EngineUnavailableError,
    FinishedOutput,
    IdempotencyKey,
    PooledOutput,
    PromptLogprobsOutput,
    QueueFullError,
    Request,
    ResumedReply,
    Submission,
    TakenOver,
    TextOutput,
    TokenIdError,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.errors import EventLMError, UsageError
from eventlm.frontend import protocol
from eventlm.frontend.protocol import (
    Administer,
    Beat,
    Call,
    CallOnObject,
    CallOnReply,
    CallResult,
    CancelRequest,
    Draining,
    EndText,
    FrontEndFailed,
    FrontEndReady,
    FrontEndSetup,
    GetMetrics,
    JoinReply,
    LeaveReply,
    Lost,
    Outputs,
    ResumeReply,
    Signal,
    StateChanged,
    Submit,
    call_error,
    decode_from_front_end,
    decode_result,
    decode_to_front_end,
    encode,
    error_from,
)
from eventlm.metrics.components import (
    SCHEDULING_BUCKETS_NS,
    EngineMetrics,
    FrontEndMetrics,
    RecorderMetrics,
)
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.store import MetricsStore
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.scheduling_params import SchedulingParams
from tests.replay.golden import FOLDER

LOGPROBS = TokenLogprobs(logprobs=[-0.5, -math.inf], ranks=[1, 9], top_ids=[[3], [4]], top_logprobs=[[-0.1], [0.0]])

SETUP = FrontEndSetup(
    index=2,
    config=Config(server=ServerConfig(api_key="secret")),
    model="fake",
    model_names=["fake"],
    max_model_len=64,
    vocab_size=512,
    origin_ns=7,
    created=1,
)
DELTA = AnswerDelta(
    text="größer",
    num_tokens=2,
    reasoning="hm",
    calls=[CallPart(1, "add", '{"a"'), CallPart(1, "", ":1}")],
    token_ids=[3, 4],
    logprobs=b'[{"token": "a"}]',
    embedding=b"\0\1\xff",
)
OUTPUTS = Outputs(
    [
        (1, 0, TokensOutput(0, 3, [5, 6], LOGPROBS)),
        (1, 1, TokensOutput(1, 0, [7])),
        (2, 0, PromptLogprobsOutput(0, 1, LOGPROBS)),
        (3, 0, PooledOutput(0, b"\0\1\xff")),
        (1, 0, ClosingOutput(0, "eos", 9)),
        (1, 0, FinishedOutput(0, "stop", 8, 16)),
        (1, 0, TextOutput(0, 3, DELTA)),
        (1, 0, FinishedOutput(0, "stop", 8, 16, usage=AnswerUsage(prompt=5, completion=8), stop_reason="größer")),
        (1, 0, FinishedOutput(1, "error", 0, 0, failure=BackendFailure("refused", "no", 400, param="n", code="bad"))),
        (1, 0, TakenOver()),
        (4, 0, Lost("the engine has died")),
    ]
)
REQUEST = Request(
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(
        n=2,
        logit_bias={3: -1.5},
        bad_words=["größer"],
        bad_words_token_ids=((1, 2), (3,)),
        stop_token_ids=[9],
        logprobs=2,
        seed=2**64 - 1,
    ),
    cache_salt="größer",
    scheduling=SchedulingParams(model="fake", kind="generate", deadline_ns=10**15, has_text_ends=True),
)
FORWARDED = structs.replace(
    REQUEST, forwarded=ForwardedRequest(endpoint="chat", body='{"messages": [{"content": "größer"}]}'.encode())
)

KEY = IdempotencyKey(b"\0key", b"\xffrequest")
SUBMISSION = Submission(
    reply_id="cmpl-1", owner="somebody", edge_state=b"\0\xff", is_resumable=True, idempotency_key=KEY
)


@pytest.mark.parametrize(
    "message",
    [
        SETUP,
        OUTPUTS,
        StateChanged(state="dead", paused=False, max_model_len=8, num_waiting_for_room=1),
        Signal("reload"),
        Signal("drain"),
        Signal("cut"),
    ],
)
def test_messages_of_the_engine_arrive_as_sent(message: Any) -> None:
    assert decode_to_front_end(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        FrontEndReady(),
        FrontEndFailed("no tokenizer.json"),
        Beat(num_requests=3, cpu_ns=10**12, resident_bytes=10**9),
        Draining(4),
        Call(1, Submit([REQUEST, FORWARDED])),
        Call(2, GetMetrics()),
        Call(3, Submit([REQUEST], SUBMISSION)),
        Call(4, ResumeReply("cmpl-1", "somebody", RateLimits(requests_per_minute=60))),
        Call(4, JoinReply(KEY, "somebody", RateLimits(requests_per_minute=60))),
        Call(5, CallOnReply("cancel_reply", "cmpl-1", "somebody")),
        Call(6, CallOnReply("status", "cmpl-1", "somebody")),
        Call(7, CallOnReply("explain", "cmpl-1", "somebody")),
        Call(8, Administer(SwapPolicy("edf"))),
        Call(8, Administer(AddBackend(spec=BackendSpec(url="http://a:1", key="k", weight=2.0), model="m"))),
        Call(9, CallOnObject(PutObject(kind="k", id="a", owner="me", data=b"\xff", items=[StoredItem("1", b"\0")]))),
        Call(10, CallOnObject(ChangeObject(kind="k", id="a", owner="me", items=[], hold=False, holder=2))),
        Call(11, CallOnObject(GetItem(owner="me", item_id="1"))),
        CancelRequest(3, "client"),
        LeaveReply("cmpl-1", 2),
        EndText(3, 0, 17, "stop"),
    ],
)
def test_messages_of_a_front_end_arrive_as_sent(message: Any) -> None:
    assert decode_from_front_end(encode(message)) == message


def test_a_reply_that_is_resumed_comes_as_it_was_sent() -> None:
    reply = ResumedReply(submission=SUBMISSION, group=[REQUEST], requests=[7], reader=3, num_outputs=2)
    message = decode_to_front_end(encode(protocol.call_result(5, reply)))
    assert isinstance(message, CallResult)
    assert decode_result(message.result, ResumedReply) == reply


def test_the_engines_figures_come_as_they_were_sent() -> None:
    store = MetricsStore()
    with LogReader(FOLDER / "fcfs_one_replica.jsonl") as log:
        for line in log:
            store.apply(line.event())
    times = Histogram.over(SCHEDULING_BUCKETS_NS)
    times.observe(50_000)
    metrics = EngineMetrics(
        log=store.snapshot(),
        state="ready",
        scheduling_time=times,
        recorder=RecorderMetrics(num_bytes=10, num_events_behind=0, is_writing=True, sync_time=Histogram.over((1,))),
        front_ends=[FrontEndMetrics(index=1, is_up=True, num_restarts=2, cpu_ns=5)],
    )
    message = decode_to_front_end(encode(protocol.call_result(5, metrics)))
    assert isinstance(message, CallResult)
    assert message.id == 5
    assert decode_result(message.result, EngineMetrics) == metrics


RATE_LIMIT_ERROR = RateLimitError(
    "too many", "tokens", 5, RateLimitState(tokens=BucketState(limit=3, remaining=0, reset_ns=9))
)


class UnknownToFrontEnds(QueueFullError):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFullError("full"), QueueFullError),
        (ContextLengthError("long"), ContextLengthError),
        (TokenIdError("id"), TokenIdError),
        (UsageError("n"), UsageError),
        (EngineUnavailableError("loading"), EngineUnavailableError),
        (UnknownReplyError("none"), UnknownReplyError),
        (ObjectStoreError("full"), ObjectStoreError),
        (UnknownObjectError("none"), UnknownObjectError),
        (ObjectHeldError("held"), ObjectHeldError),
        (DuplicateItemError("1"), DuplicateItemError),
        (ObjectTooLargeError("large"), ObjectTooLargeError),
        (UnknownToFrontEnds("full"), QueueFullError),
        (RATE_LIMIT_ERROR, RateLimitError),
        (EventLMError("other"), EventLMError),
    ],
)
def test_errors_are_raised_again_at_the_other_side(error: EventLMError, kind: type[EventLMError]) -> None:
    message = decode_to_front_end(encode(call_error(3, error)))
    assert isinstance(message, protocol.CallError)
    assert message.id == 3
    found = error_from(message)
    assert type(found) is kind
    assert str(found) == str(error)
    assert vars(found) == vars(error)
