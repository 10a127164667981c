"""Engines that go on with the run of one that died, in one process, with real workers."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError
from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME
from eventlm.bus.segment_file import SegmentFile
from eventlm.bus.spool import SpoolWriter, read_frames
from eventlm.bus.token_log_check import check_token_logs
from eventlm.config import RecordConfig
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.recovery.recover import MAX_ATTEMPTS
from eventlm.engine.replicas.group import Replicas
from eventlm.engine.request import EngineUnavailableError, FinishedOutput, Submission, TokensOutput, UnknownReplyError
from eventlm.engine.spool.records import DrainRecords, StepRecord, decode_frame
from eventlm.errors import InvariantError
from eventlm.events import Cancelled, Fact, Recovered
from eventlm.replay.verify.verifier import verify
from eventlm.sampling_params import SamplingParams
from eventlm.system.disk import SYSTEM_DISK
from eventlm.system.system import real_system
from eventlm.types import SequenceId
from eventlm.worker.fake.tokens import fake_token
from tests.engine.engines import SLOW, fake_setup
from tests.made_requests import make_request
from tests.processes import until

NUM_TOKENS = 40
RESUME_SECONDS = 60
REQUEST = make_request([1, 2, 3, 4], SamplingParams(max_tokens=NUM_TOKENS, seed=7, ignore_eos=True))
EXPECTED = [fake_token(7, 0, position) for position in range(NUM_TOKENS)]


class Reader:
    """Collects the outputs of a reply."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason = ""

    def __call__(self, index: int, output: Any) -> None:
        if isinstance(output, TokensOutput):
            assert output.start == len(self.tokens)
            self.tokens += output.token_ids
        elif isinstance(output, FinishedOutput):
            self.reason = output.reason


async def start(folder: Path, *, max_model_len: int = 0, **changes: Any) -> InferenceEngine:
    """An engine that recovers what another one left in the folder. changes: of how it is recorded, or of its limits and
    plug-ins.
    """
    recording = {name: changes.pop(name) for name in [*changes] if name in RecordConfig.__struct_fields__}
    setup = fake_setup(record=folder / "runs", fake=SLOW, **{"max_num_seqs": 8, **changes})
    if max_model_len:
        model = structs.replace(setup.config.model, max_model_len=max_model_len)
        core = structs.replace(setup.core, max_model_len=max_model_len)
        setup = structs.replace(setup, core=core, config=structs.replace(setup.config, model=model))
    record = structs.replace(setup.config.record, recover=str(folder / "spool"), **recording)
    server = structs.replace(setup.config.server, resume_seconds=RESUME_SECONDS)
    setup = structs.replace(setup, config=structs.replace(setup.config, record=record, server=server))
    engine = InferenceEngine(setup, real_system())
    await engine.start()
    return engine


async def die(engine: InferenceEngine) -> None:
    """Leave everything as it is, as a killed process would."""
    engine._broken = True
    engine.state = "dead"
    await engine.stop()


async def submit(engine: InferenceEngine, reply_id: str, **fields: Any) -> Reader:
    reader = Reader()
    submission = Submission(reply_id=reply_id, owner="o", **fields)
    await engine.submit([REQUEST], submission=submission, on_output=reader)
    await until(lambda: len(reader.tokens) > 3)
    return reader


def frames(folder: Path) -> list[bytes]:
    [path] = (folder / "spool").glob("*/spool-*")
    return read_frames(SYSTEM_DISK, path).bodies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize("record_sync", ["none", "interval", "group"])
async def test_a_reply_goes_on_in_another_engine(folder: Path, record_sync: str) -> None:
    first = await start(folder, record_sync=record_sync)
    before = await submit(first, "r", is_resumable=True)
    await submit(first, "not resumable")
    await die(first)
    second = await start(folder, record_sync=record_sync)
    assert (second.run_folder, second.origin_ns) == (first.run_folder, first.origin_ns)
    after = Reader()
    resumed = await second.resume("r", "o", after)
    assert resumed.num_outputs >= len(before.tokens)
    await until(lambda: after.reason)
    assert after.tokens[: len(before.tokens)] == before.tokens
    assert (after.tokens, after.reason) == (EXPECTED, "length")
    assert [*second._require_engine_core().live.requests] == []
    assert second.metrics().num_recoveries == 1
    run = second.run_folder
    await second.stop()
    assert run is not None
    assert verify(run).exit_code == 0
    events = [line.event() for line in LogReader(run)]
    assert [event.reason for event in events if isinstance(event, Recovered)] == ["process"]
    assert [event.reason for event in events if isinstance(event, Cancelled)] == ["recovery"]


async def test_a_token_log_goes_on_too(folder: Path) -> None:
    first = await start(folder, record_tokens=True)
    await submit(first, "r", is_resumable=True)
    await die(first)
    assert first.run_folder is not None
    with (first.run_folder / "tokens.jsonl").open("ab") as file:
        # Of a drain whose events were not written.
        file.write(b'{"t":"outputs","s":9999,"tokens":[[1]],"h":"0123456789abcdef"}\n{"t":')
    second = await start(folder, record_tokens=True)
    after = Reader()
    await second.resume("r", "o", after)
    await until(lambda: after.reason)
    run = second.run_folder
    await second.stop()
    assert run is not None
    assert verify(run).exit_code == 0
    tokens = check_token_logs(run)
    assert tokens is not None
    assert (tokens.is_sound, tokens.missing) == (True, [])


async def test_a_run_can_be_gone_on_with_after_an_engine_that_did_not_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(folder)
    await submit(first, "reply", is_resumable=True)
    await die(first)
    with monkeypatch.context() as patched:
        patched.setattr(Replicas, "start", AsyncMock(side_effect=EngineUnavailableError("no worker starts")))
        with pytest.raises(EngineUnavailableError):
            await start(folder)
    second = await start(folder)
    reader = Reader()
    await second.resume("reply", "o", reader)
    await until(lambda: reader.reason != "")
    await second.stop()
    assert reader.tokens == EXPECTED


@pytest.mark.parametrize("record_tokens", [False, True])
async def test_a_run_keeps_its_token_log_or_lack_of_one(folder: Path, record_tokens: bool) -> None:
    first = await start(folder, record_tokens=record_tokens)
    await submit(first, "r", is_resumable=True)
    await die(first)
    second = await start(folder, record_tokens=not record_tokens)
    after = Reader()
    await second.resume("r", "o", after)
    await until(lambda: after.reason)
    run = second.run_folder
    await second.stop()
    assert run == first.run_folder is not None
    assert verify(run).exit_code == 0
    assert (check_token_logs(run) is not None) == record_tokens


async def test_replies_cannot_be_asked_for_before_they_are_there_again(folder: Path) -> None:
    engine = InferenceEngine(fake_setup(record=folder / "runs"), real_system())
    with pytest.raises(EngineUnavailableError):
        await engine.resume("reply", "o", Reader())
    with pytest.raises(EngineUnavailableError):
        await engine.cancel_reply("reply", "o")


async def test_a_run_that_goes_on_is_the_latest(folder: Path) -> None:
    first = await start(folder)
    assert first.run_folder is not None
    await die(first)
    # It had died just before it named its run.
    (folder / "runs" / LATEST_NAME).rename(first.run_folder / LATEST_NAME)
    second = await start(folder)
    assert (folder / "runs" / LATEST_NAME).resolve() == first.run_folder
    await second.stop()


async def test_clients_have_all_the_time_to_come_back_once_the_engine_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(folder)
    await submit(first, "reply", is_resumable=True)
    await die(first)
    start_replicas = Replicas.start

    async def start_late(self: Replicas, **options: Any) -> Any:
        await asyncio.sleep(1.1)
        return await start_replicas(self, **options)

    monkeypatch.setattr(Replicas, "start", start_late)
    monkeypatch.setitem(globals(), "RESUME_SECONDS", 1)
    second = await start(folder)
    reader = Reader()
    await second.resume("reply", "o", reader)
    await until(lambda: reader.reason != "")
    await second.stop()
    assert reader.tokens == EXPECTED


async def test_a_deleted_reply_stays_deleted(folder: Path) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await submit(first, "kept", is_resumable=True)
    assert await first.cancel_reply("r", "o")
    await die(first)
    second = await start(folder)
    with pytest.raises(UnknownReplyError):
        await second.resume("r", "o", Reader())
    await second.resume("kept", "o", Reader())
    await second.stop()


async def test_what_is_over_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.engine.engine_core.FORGET_NS", 50_000_000)
    engine = await start(folder)
    reader = await submit(engine, "secret reply")
    assert any(b"secret reply" in frame for frame in frames(folder))
    await until(lambda: reader.reason)
    await until(lambda: not any(b"secret reply" in frame for frame in frames(folder)))
    await engine.stop()
    assert [*(folder / "spool").iterdir()] == []


async def hand_over(engine: InferenceEngine) -> None:
    """End as a process does that is followed by the next one in order."""
    engine.hand_over()
    await die(engine)


@pytest.mark.parametrize(
    ("end", "changes"),
    [
        (die, {"max_num_seqs": 2, "max_num_batched_tokens": 64}),
        (die, {"max_model_len": 64}),
        (hand_over, {"replicas": 2}),
        (hand_over, {"policy": {"type": "edf"}, "router": {"type": "round_robin"}}),
    ],
)
async def test_requests_go_on_under_other_limits_in_a_run_of_their_own(
    folder: Path, end: Callable[[InferenceEngine], Awaitable[None]], changes: dict[str, Any]
) -> None:
    first = await start(folder)
    over = await submit(first, "over", is_resumable=True)
    await until(lambda: over.reason)
    before = await submit(first, "r", is_resumable=True)
    await submit(first, "not resumable")
    [going_on, lost] = first._require_engine_core().live.requests
    await end(first)
    second = await start(folder, **changes)
    assert second.run_folder is not None
    assert second.run_folder != first.run_folder
    assert second.origin_ns == first.origin_ns
    # Nobody can go on with the first run any more.
    assert [path.name for path in (folder / "spool").iterdir()] == [second.run_folder.name]
    kept, after = Reader(), Reader()
    await second.resume("over", "o", kept)
    assert (kept.tokens, kept.reason) == (EXPECTED, "length")
    await second.resume("r", "o", after)
    assert after.tokens[: len(before.tokens)] == before.tokens
    assert [*second._require_engine_core().live.requests] == [going_on]
    late = await submit(second, "late")
    await until(lambda: after.reason and late.reason)
    assert (after.tokens, after.reason) == (EXPECTED, "length")
    assert late.tokens == EXPECTED
    metrics = second.metrics()
    await second.stop()
    assert sum(replica.num_running + replica.num_waiting for replica in metrics.log.replicas) == 0
    events = [line.event() for line in LogReader(second.run_folder)]
    assert [event.run for event in events if isinstance(event, Recovered)] == [
        first.run_folder and first.run_folder.name
    ]
    assert [event.request for event in events if isinstance(event, Cancelled)] == [lost]
    assert verify(second.run_folder).exit_code == 0


async def test_carried_requests_survive_the_next_death(folder: Path) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)
    second = await start(folder, max_num_seqs=2)
    await die(second)
    third = await start(folder, max_num_seqs=2)
    assert third.run_folder == second.run_folder
    after = Reader()
    await third.resume("r", "o", after)
    await until(lambda: after.reason)
    assert (after.tokens, third.metrics().num_recoveries) == (EXPECTED, 2)
    run = third.run_folder
    await third.stop()
    assert run is not None
    assert verify(run).exit_code == 0


async def test_a_request_that_has_no_room_under_other_limits_is_lost(folder: Path) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)
    with capture_logs() as lines:
        second = await start(folder, max_model_len=32)
    assert [(line["reason"], line["requests"]) for line in lines if line["event"] == "requests cannot go on"] == [
        ("the context has 32 tokens now (--max-model-len)", 1)
    ]
    with pytest.raises(UnknownReplyError):
        await second.resume("r", "o", Reader())
    await second.stop()


async def test_an_engine_with_other_plugins_cannot_follow_the_log_of_one_that_died(folder: Path) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)
    with capture_logs() as lines:
        second = await start(folder, policy={"type": "edf"})
    [line] = [line for line in lines if line["event"] == "a run cannot be recovered"]
    assert "other plug-ins than this engine" in line["error"]
    assert second.run_folder is not None
    assert [path.name for path in (folder / "spool").iterdir()] == [second.run_folder.name]
    await second.stop()


@pytest.mark.parametrize("is_torn", [False, True])
async def test_an_engine_that_dies_while_it_carries_requests_loses_none(
    folder: Path, is_torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)

    def fail(engine: InferenceEngine, found: object) -> None:
        engine._require_engine_core().close()
        raise EngineUnavailableError("as planned")

    with monkeypatch.context() as patched:
        patched.setattr(InferenceEngine, "_take_over", fail)
        with pytest.raises(EngineUnavailableError):
            await start(folder, max_num_seqs=2)
    second = (folder / "runs" / LATEST_NAME).resolve()
    assert second != first.run_folder
    if is_torn:
        trace = second / TRACE_NAME
        content = trace.read_bytes()
        trace.write_bytes(content[: content.index(b"\n") + 100])
    third = await start(folder, max_num_seqs=2)
    assert (third.run_folder == second) != is_torn
    after = Reader()
    await third.resume("r", "o", after)
    await until(lambda: after.reason)
    assert after.tokens == EXPECTED
    await third.stop()


async def test_requests_that_cannot_be_carried_are_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)
    with monkeypatch.context() as patched:
        patched.setattr("eventlm.engine.recovery.carrying_over.carry", Mock(side_effect=InvariantError("as planned")))
        for _ in range(MAX_ATTEMPTS):
            with pytest.raises(InvariantError):
                await start(folder, max_num_seqs=2)
        engine = await start(folder, max_num_seqs=2)
    with pytest.raises(UnknownReplyError):
        await engine.resume("r", "o", Reader())
    await engine.stop()


async def test_a_run_before_is_kept_until_the_one_that_carries_its_requests_has_begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)
    full = Mock(return_value=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patched:
        patched.setattr(SegmentFile, "write", full)
        with pytest.raises(LogWriteError):
            await start(folder, max_num_seqs=2)
    second = await start(folder, max_num_seqs=2)
    after = Reader()
    await second.resume("r", "o", after)
    await until(lambda: after.reason)
    assert after.tokens == EXPECTED
    await second.stop()


def lose_tokens(folder: Path, most: int = 1) -> None:
    """Damage the first records of the spool that have tokens."""
    [path] = (folder / "spool").glob("*/spool-*")
    content = path.read_bytes()
    for frame in frames(folder):
        records = decode_frame(frame)
        if isinstance(records, DrainRecords) and most and any(isinstance(each, StepRecord) for each in records.records):
            content = content.replace(frame, bytes(reversed(frame)))
            most -= 1
    path.write_bytes(content)


async def test_a_reply_that_is_over_and_of_which_tokens_are_lost_is_not_kept(folder: Path) -> None:
    first = await start(folder)
    over = await submit(first, "r", is_resumable=True)
    await until(lambda: over.reason)
    await die(first)
    lose_tokens(folder)
    for _ in range(2):
        engine = await start(folder)
        with pytest.raises(UnknownReplyError):
            await engine.resume("r", "o", Reader())
        await die(engine)


async def test_a_damaged_request_ends_the_others_of_its_reply(folder: Path) -> None:
    first = await start(folder, max_num_seqs=1)
    await first.submit([REQUEST] * 2, submission=Submission(reply_id="r", is_resumable=True), on_output=Reader())
    [early, late] = first._require_engine_core().live.requests
    await until(lambda: (first._require_engine_core().live.num_output_tokens(SequenceId(early, 0)) or 0) > 3)
    await die(first)
    lose_tokens(folder)
    second = await start(folder, max_num_seqs=1)
    assert [*second._require_engine_core().live.requests] == []
    assert second.run_folder is not None
    run = second.run_folder
    await second.stop()
    events = [line.event() for line in LogReader(run)]
    assert [event.request for event in events if isinstance(event, Cancelled)] == [early, late]


@pytest.mark.parametrize("kind", [Recovered, Cancelled])
async def test_a_recovery_that_fails_at_any_step_has_not_succeeded(
    folder: Path, kind: type[Fact], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(folder)
    await submit(first, "not resumable")
    await die(first)
    see_fact = EngineCore._see_fact

    def fail(self: EngineCore, fact: Fact) -> None:
        if isinstance(fact, kind):
            raise InvariantError("as planned")
        see_fact(self, fact)

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "_see_fact", fail)
        with pytest.raises(EngineUnavailableError, match="as planned"):
            await start(folder)
    assert [path.name for path in (folder / "spool").glob("*/attempt-*")] == ["attempt-1"]


async def test_a_full_disk_costs_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await start(folder)
    reader = await submit(first, "r", is_resumable=True)
    await die(first)
    # As if a power failure had taken the end of the spool.
    [path] = (folder / "spool").glob("*/spool-*")
    path.write_bytes(path.read_bytes()[:-5])
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    for _ in range(MAX_ATTEMPTS + 1):
        with monkeypatch.context() as patched:
            patched.setattr(SpoolWriter, "start_file", full)
            with pytest.raises(LogWriteError, match="No space left on device"):
                await start(folder)
    last = await start(folder)
    again = Reader()
    resumed = await last.resume("r", "o", again)
    await until(lambda: again.reason)
    await last.stop()
    assert again.tokens == EXPECTED
    # That outputs may be lost is not forgotten.
    assert len(resumed.rewinds) == 1
    assert resumed.rewinds[0] <= len(reader.tokens)


@pytest.mark.parametrize(("record_syncs", "num_rewinds"), [(("none", "group"), 0), (("group", "none"), 1)])
async def test_what_a_power_failure_takes_depends_on_the_engine_that_died(
    folder: Path, record_syncs: tuple[str, str], num_rewinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = record_syncs
    engine = await start(folder, record_sync=before)
    await submit(engine, "r", is_resumable=True)
    await die(engine)
    await die(await start(folder, record_sync=after))
    monkeypatch.setattr("eventlm.system.clock.SystemClock.boot_id", lambda self: "another boot")
    engine = await start(folder, record_sync=after)
    resumed = await engine.resume("r", "o", Reader())
    assert len(resumed.rewinds) == num_rewinds
    await engine.stop()


async def test_a_damaged_request_that_its_engine_could_not_end_is_ended_by_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(folder)
    await submit(first, "r", is_resumable=True)
    await die(first)
    lose_tokens(folder)
    with monkeypatch.context() as patch:
        patch.setattr(InferenceEngine, "_take_over", lambda self, found: None)
        await die(await start(folder))
    last = await start(folder)
    assert [*last._require_engine_core().live.requests] == []
    await last.stop()
