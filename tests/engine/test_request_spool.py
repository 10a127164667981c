"""What the spool of an engine holds: `tests/engine/recovery` shows that it is enough."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.spool import SpoolWriter, read_frames
from eventlm.engine.block_names import BlockNames
from eventlm.engine.group_admission import reply_with_sinks
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.request import Submission
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.request_spool import RequestSpool
from eventlm.engine.spool.records import DrainRecords, KeptReply, SpoolHead, StepRecord, decode_frame
from eventlm.sampling_params import SamplingParams
from eventlm.system.disk import SYSTEM_DISK
from tests.made_requests import make_request


def test_it_begins_with_what_lives_and_goes_on_with_what_comes(tmp_path: Path) -> None:
    names = BlockNames(b"names", block_size=4, capacity=8)
    live = LiveRequests(names, block_size=4, seed_key=b"s", digest_key=b"d")
    registry = RequestRegistry(
        keep_ns=1, max_bytes=2**30, now_ns=lambda: 0, cancel=lambda request: None, wake=lambda delay_ns: None
    )
    writer = SpoolWriter(SYSTEM_DISK, tmp_path / "run")
    spool = RequestSpool(writer, live, registry, trace=tmp_path / "runs" / "run", boot_id="boot", origin_ns=5)
    request = make_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
    reply, sinks = reply_with_sinks(registry, Submission(reply_id="r", is_resumable=True), [request], [print], None)
    for seq, sink in ((3, sinks[0]), (4, print)):
        live.arrive(seq, request, sink, group_size=1, group_index=0)
    registry.add(reply, [3])
    assert writer.flush() is None
    spool.prepare(9)
    writer.start_file(9)
    writer.go_on()
    spool.add(StepRecord(10, [[7]]))
    writer.append(spool.take())
    assert spool.take() == []
    assert writer.flush() is None
    head, of_reply, alone, drain = map(decode_frame, read_frames(SYSTEM_DISK, writer.path).bodies)
    assert isinstance(head, SpoolHead)
    assert (head.run, head.first_s, head.boot_id, head.origin_ns) == ("run", 9, "boot", 5)
    assert (head.digest_key, head.block_names) == (b"d", [(b"names", 2)])
    assert isinstance(of_reply, KeptReply)
    assert (of_reply.submission, of_reply.requests) == (reply.submission, [3])
    assert [kept.seq for kept in of_reply.live] == [3]
    assert isinstance(alone, KeptReply)
    assert (alone.submission, [kept.seq for kept in alone.live]) == (None, [4])
    assert drain == DrainRecords([StepRecord(10, [[7]])])
    spool.remove()
    assert not (tmp_path / "run").exists()
