from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import FinishedOutput, RequestOutput, Submission, TokensOutput
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import KeptReply, KeptRequest
from eventlm.sampling_params import SamplingParams
from eventlm.text.adoption import adopt, read_to_the_end
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tools.formats import NO_FORMATS
from tests.made_requests import make_request


class Engine:
    """What an adopter needs of an engine."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int, int, str]] = []

    def end_text(self, *end: Any) -> None:
        self.ends.append(end)

    def cancel(self, request: int, reason: str) -> None:
        """Nothing is cancelled here."""

    def now_ns(self) -> int:
        return 0


async def test_the_ends_of_texts_are_found_as_if_the_edge_had_not_died() -> None:
    registry = RequestRegistry(
        keep_ns=1, max_bytes=2**30, now_ns=lambda: 0, cancel=lambda request: None, wake=lambda delay_ns: None
    )
    request = make_request([1], SamplingParams(max_tokens=9, stop=["lo w"]), has_text_ends=True)
    before = list(b"hello ")
    kept = KeptReply(
        [KeptRequest(7, request, 1, "", "", [], [])],
        Submission(reply_id="r", is_resumable=True),
        [request],
        [7],
        [1],
        [msgspec.msgpack.encode((0, TokensOutput(0, 0, before)))],
        num_unfinished=1,
    )
    (sink,) = registry.restore(kept)
    (orphan,) = registry.orphans()
    engine = Engine()
    generation = adopt(cast(InferenceEngine, engine), orphan, lambda model: (FakeTokenizer(), NO_FORMATS))
    assert registry.orphans() == []
    reading = asyncio.create_task(read_to_the_end(generation))
    outputs: list[RequestOutput] = [
        TokensOutput(0, len(before), list(b"world")),
        FinishedOutput(0, "stop", 7, 0),
    ]
    for output in outputs:
        sink(output)
    await reading
    assert engine.ends == [(7, 0, 7, "stop")]
