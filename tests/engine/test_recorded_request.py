"""A request that is made again of its arrival and its line in the token log is the same to core and worker."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from eventlm.bus.token_log import PromptTokens, decode_line, encode_line
from eventlm.engine.block_names import BlockNames
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.recorded_request import recorded_request
from eventlm.engine.request import Request
from eventlm.events import Arrived
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from tests.worker.launches import launched

#: Every field has a value that is not its default.
FIELDS: dict[str, Any] = {
    "prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13],
    "sampling": SamplingParams(
        n=2,
        max_tokens=7,
        temperature=0.25,
        seed=77,
        logit_bias={3: 1.5},
        stop_token_ids=[4],
        stop=["a"],
        bad_words=["b"],
    ),
    "scheduling": SchedulingParams(
        model="m",
        kind="score",
        skip_cache_read=True,
        adapter="a",
        priority=-3,
        deadline_ns=5,
        slo_ttft_ns=6,
        slo_tpot_ns=7,
        service_class="batch",
        session=8,
        parent=9,
        drop_if_late=True,
        has_text_ends=True,
        waits_for_grammar=True,
        offline=True,
        received_ns=10,
        ready_ns=11,
        front_end=2,
    ),
    "cache_salt": "salt",
}
#: What only the edge looks at; it has done so when the trace is there.
EDGE_FIELDS = {"visible_token_ids", "message_format", "beams"}
#: What other servers are sent: no worker here could run it again.
NOT_RECORDED = {"forwarded"}


def live_requests() -> LiveRequests:
    names = BlockNames(b"n" * 32, block_size=4, capacity=100)
    return LiveRequests(names, block_size=4, seed_key=b"s", digest_key=b"d" * 32)


def arrive(live: LiveRequests, seq: int, request: Request) -> tuple[Arrived, PromptTokens]:
    """The fact, and the line as it is read again."""
    arrived = structs.replace(live.arrive(seq, request, lambda _: None, group_size=1, group_index=0), s=seq)
    line = decode_line(encode_line(live.prompt_tokens(seq)))
    assert isinstance(line, PromptTokens)
    return arrived, line


def test_nothing_is_lost_on_the_way() -> None:
    assert {field.name for field in structs.fields(Request)} == FIELDS.keys() | EDGE_FIELDS | NOT_RECORDED
    request = Request(**FIELDS)
    first, second = live_requests(), live_requests()
    arrived, line = arrive(first, 3, request)
    again = recorded_request(arrived, line)
    for field in structs.fields(Request):
        if field.name not in {"sampling", "cache_salt"}:
            assert getattr(again, field.name) == getattr(request, field.name), field.name
    assert again.sampling == structs.replace(request.sampling, stop=[], bad_words=[])
    arrived_again, line_again = arrive(second, 3, again)
    assert arrived_again == arrived
    assert structs.replace(line_again, cache_salt=line.cache_salt) == line
    launch = launched(0, chunks=[(3, 0, 0, 9, 1), (3, 1, 0, 9, 1)])
    assert second.launch(launch) == first.launch(launch)


def test_a_drawn_seed_is_that_of_the_arrival() -> None:
    request = Request(**FIELDS | {"sampling": structs.replace(FIELDS["sampling"], seed=None)})
    arrived, line = arrive(live_requests(), 3, request)
    assert line.params.seed is None
    assert recorded_request(arrived, line).sampling.seed == int(arrived.seed) > 0


def test_a_salt_is_not_recorded_and_still_separates_blocks() -> None:
    first, second = live_requests(), live_requests()
    blocks, blocks_again = [], []
    for seq, salt in enumerate(["", "one", "two", "one", ""]):
        arrived, line = arrive(first, seq, Request(**FIELDS | {"cache_salt": salt}))
        assert bool(line.cache_salt) == bool(salt)
        assert "one" not in line.cache_salt
        blocks.append(arrived.blocks)
        blocks_again.append(arrive(second, seq, recorded_request(arrived, line))[0].blocks)
    assert blocks_again == blocks
    assert (blocks[0], blocks[1]) == (blocks[4], blocks[3])
    assert len({tuple(names) for names in blocks}) == 3
