from __future__ import annotations

import msgspec
import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AttemptId, BackendFailure, ForwardedRequest
from eventlm.engine.backends.answers import Answer
from eventlm.engine.request import Request, Submission
from eventlm.engine.spool.records import (
    AnswerEndRecord,
    ArrivalRecord,
    DeltasRecord,
    DrainRecords,
    DropRecord,
    FailureRecord,
    GrammarErrorRecord,
    KeptReply,
    KeptRequest,
    KeptSequence,
    KeptWorker,
    SpoolHead,
    StepRecord,
    decode_frame,
    encode_frame,
)
from eventlm.events import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.worker.protocol import RowExtras

REQUEST = Request(
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=5),
    scheduling=SchedulingParams(model="m"),
    forwarded=ForwardedRequest(endpoint="chat", body=b"{}"),
)
FRAMES = [
    SpoolHead(
        run="r",
        trace="/runs/r",
        first_s=7,
        boot_id="b",
        origin_ns=1,
        digest_key=b"d",
        block_names=[(b"k", 9)],
        workers=[
            KeptWorker(
                0, 3, [Launched(replica=0, epoch=3, step=1, decodes=[], chunks=[], num_tokens=0, predicted_ns=0)]
            )
        ],
    ),
    KeptReply(
        [
            KeptRequest(
                4,
                REQUEST,
                1,
                "",
                "",
                [KeptSequence(0, [5, 6], 1, b"h")],
                [(0, Answer(ForwardedRequest(endpoint="chat", body=b"{}"), 1, 3, texts=["a"]))],
            )
        ],
        Submission(reply_id="x", owner="o"),
        [REQUEST],
        [4],
        [1],
        [b"output"],
        1,
    ),
    DrainRecords(
        [
            ArrivalRecord(8, [REQUEST], Submission(reply_id="x")),
            StepRecord(9, [[1], []], [RowExtras(row=0, embedding=b"e")]),
            DeltasRecord(10, [(AttemptId(4, 0, 1), [AnswerDelta("t", 1)])]),
            AnswerEndRecord(11, AnswerEnd("stop")),
            FailureRecord(12, BackendFailure("connect", "refused")),
            GrammarErrorRecord(13, "no such rule"),
            DropRecord("x"),
        ]
    ),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_come_back(frame: SpoolHead | KeptReply | DrainRecords) -> None:
    assert decode_frame(encode_frame(frame)) == frame


def test_what_is_no_frame_is_refused() -> None:
    for body in (b"", b"\xc1", encode_frame(["other", 1]), encode_frame(FRAMES[0])[:-1]):
        with pytest.raises(msgspec.DecodeError):
            decode_frame(body)
