"""Every golden run, cut anywhere: another engine goes on, and ends with the outcomes of the run that was not cut."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from eventlm.bus.run_folder import TRACE_NAME
from eventlm.bus.spool import SpoolWriter, read_frames
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.recovery.recover import MAX_ATTEMPTS, check_spool_folder
from eventlm.engine.spool.records import SPOOL_FORMAT, SpoolHead, decode_frame, encode_frame
from eventlm.errors import UsageError
from eventlm.replay.verify.verifier import verify
from eventlm.system.disk import SYSTEM_DISK
from tests.engine.recovery.crashes import DAMAGED, RUN, CrashingSimulation, Death, dead_engine
from tests.replay.golden import GOLDEN
from tests.workload import Outcome

#: Ends that depend on when something came.
_BY_TIME = {"cancelled", "deadline", "front_end_lost", "error"}
#: How many places each golden run is cut at here; `make soak` cuts it everywhere.
_NUM_CUTS = 12

Outcomes = dict[tuple[int, int], Outcome]


def _run(
    folder: Path,
    name: str,
    *deaths: Death,
    segment_bytes: int = 0,
    damage: Callable[[Path, Path], None] | None = None,
) -> tuple[CrashingSimulation, Outcomes]:
    golden = GOLDEN[name]
    simulation = CrashingSimulation(
        folder,
        golden.machine,
        golden.chaos,
        seed=golden.seed,
        num_requests=golden.num_requests,
        deaths=deaths,
        segment_bytes=segment_bytes,
        damage=damage,
    )
    outcomes = simulation.run()
    assert verify(folder / "runs" / RUN).exit_code == 0
    return simulation, outcomes


def _cuts(lines: list[list[int]], rng: random.Random) -> Iterator[Death]:
    """A drain is cut before and after each of its steps, at each of its lines, and within each."""
    for drain in range(1, len(lines) - 1):
        yield Death(drain, delivered=True)
        yield Death(drain)
        yield Death(drain, num_lines=0)
        yield Death(drain, num_lines=0, spooled=rng.random())
        for number, length in enumerate(lines[drain]):
            yield Death(drain, num_lines=number, num_bytes=rng.randrange(length))


def _differing(expected: Outcomes, outcomes: Outcomes) -> dict[tuple[int, int], tuple[Outcome, Outcome]]:
    pairs = {name: (expected[name], outcomes[name]) for name in expected.keys() & outcomes.keys()}
    return {
        name: (before, after)
        for name, (before, after) in pairs.items()
        if before != after and not _BY_TIME & {before.reason, after.reason}
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_a_run_goes_on_wherever_its_engine_dies(name: str, tmp_path: Path) -> None:
    whole, expected = _run(tmp_path / "whole", name)
    rng = random.Random(name)
    deaths = list(_cuts(whole.recorder.lines, rng))
    for number, death in enumerate(rng.sample(deaths, _NUM_CUTS)):
        simulation, outcomes = _run(tmp_path / str(number), name, death)
        assert simulation.num_recoveries == 1, death
        assert simulation.recovered is not None
        assert not simulation.recovered.damaged, death
        assert _differing(expected, outcomes) == {}, death


def test_engines_die_one_after_the_other_in_short_segments(tmp_path: Path) -> None:
    deaths = [Death(drain, num_lines=1) for drain in (20, 25, 22)]
    simulation, outcomes = _run(tmp_path / "run", "lpm_space_sharing", *deaths, segment_bytes=4096)
    _, expected = _run(tmp_path / "whole", "lpm_space_sharing")
    assert simulation.num_recoveries == len(deaths)
    assert _differing(expected, outcomes) == {}
    assert len(list((tmp_path / "run/runs" / RUN).glob("trace-*"))) > len(deaths)
    assert not (tmp_path / "run/spool" / RUN).exists()


def test_damage_costs_the_requests_that_it_touches(tmp_path: Path) -> None:
    _, expected = _run(tmp_path / "whole", "lpm_space_sharing")
    rng = random.Random(0)
    num_damaged = 0
    for number in range(8):

        def flip(trace: Path, spool: Path) -> None:
            content = bytearray(spool.read_bytes())
            # The first frame is of no request.
            first = len(read_frames(SYSTEM_DISK, spool).bodies[0]) + 16
            content[rng.randrange(first, len(content))] ^= 1
            spool.write_bytes(content)

        simulation, outcomes = _run(tmp_path / str(number), "lpm_space_sharing", Death(30), damage=flip)
        found = simulation.recovered
        assert found is not None
        damaged = {name for name, outcome in outcomes.items() if outcome == DAMAGED}
        num_damaged += bool(damaged)
        assert len(damaged) < len(outcomes)
        assert _differing(expected, outcomes) == {}
    assert num_damaged > 2


def test_a_run_that_ended_is_not_recovered(tmp_path: Path) -> None:
    simulation, _ = _run(tmp_path, "fcfs_one_replica")
    (tmp_path / "spool" / RUN).mkdir(parents=True)
    assert simulation.recover() is None
    assert not (tmp_path / "spool" / RUN).exists()


def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="others may use this folder"):
        check_spool_folder(SYSTEM_DISK, tmp_path)
    check_spool_folder(SYSTEM_DISK, tmp_path / "mine" / "own")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="choose another folder"):
        check_spool_folder(SYSTEM_DISK, tmp_path / "file")


def test_the_latest_run_is_the_newest_even_if_the_clock_was_set_back_before(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path)
    shutil.copytree(tmp_path / "runs" / RUN, tmp_path / "runs" / RUN.replace("2026", "2027"))
    found = simulation.recover()
    assert found is not None
    assert found.header.run == RUN
    found.file.close()


def test_segments_that_the_run_no_longer_leads_to_are_set_aside(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path)
    run = tmp_path / "runs" / RUN
    (run / "trace-000000000900.jsonl").write_bytes(b"of before a power failure")
    found = simulation.recover()
    assert found is not None
    found.last_segment(SYSTEM_DISK).close()
    assert sorted(path.name for path in run.iterdir()) == ["cut-trace-000000000900.jsonl", "trace.jsonl"]


def test_the_third_attempt_starts_empty(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path)
    for _ in range(MAX_ATTEMPTS):
        found = simulation.recover()
        assert found is not None
        found.file.close()
    assert simulation.recover() is None
    assert not (tmp_path / "spool" / RUN).exists()


def test_an_attempt_that_succeeds_does_not_count(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path)
    for _ in range(MAX_ATTEMPTS + 2):
        found = simulation.recover()
        assert found is not None
        found.forget_attempts(SYSTEM_DISK)
        found.file.close()


def test_a_spool_whose_trace_is_gone_is_removed(tmp_path: Path) -> None:
    simulation, spool = _dead(tmp_path)
    other = tmp_path / "spool" / "20260101-000000-ffffff"
    shutil.copytree(spool.parent, other)
    (tmp_path / "runs" / RUN).rename(tmp_path / "runs" / "elsewhere")
    assert simulation.recover() is None
    assert not spool.exists()
    # Its frames are not of this run, so it is not known whose it is.
    assert other.exists()


def test_a_second_engine_leaves_the_run_of_the_first_alone(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path)
    found = simulation.recover()
    assert found is not None
    assert simulation.recover() is None
    found.file.close()
    assert simulation.recover() is not None


def test_a_defect_does_not_keep_the_next_engine_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, _ = _dead(tmp_path)
    monkeypatch.setattr(LiveRequests, "emit", lambda self, emitted: 1 // 0)
    assert simulation.recover() is None


def test_a_spool_that_is_damaged_where_it_begins_is_of_no_use(tmp_path: Path) -> None:
    simulation, spool = _dead(tmp_path)
    content = spool.read_bytes()
    spool.write_bytes(content[:20] + b"?" + content[21:])
    assert simulation.recover() is None


def test_a_spool_of_another_format_is_not_read(tmp_path: Path) -> None:
    simulation, spool = _dead(tmp_path)
    head, *others = read_frames(SYSTEM_DISK, spool).bodies
    decoded = decode_frame(head)
    assert isinstance(decoded, SpoolHead)
    spool.unlink()
    writer = SpoolWriter(SYSTEM_DISK, spool.parent)
    writer.prepare(0, [encode_frame(structs.replace(decoded, format=SPOOL_FORMAT + 1)), *others])
    assert writer.flush() is None
    writer.close()
    assert simulation.recover() is None


def test_a_run_whose_header_is_damaged_is_named(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path)
    trace = tmp_path / "runs" / RUN / TRACE_NAME
    trace.write_bytes(b"?" + trace.read_bytes()[1:])
    with capture_logs() as lines:
        assert simulation.recover() is None
    assert [(line["event"], line["run"]) for line in lines] == [("a run cannot be recovered", RUN)]


def test_a_file_in_place_of_a_spool_is_none(tmp_path: Path) -> None:
    simulation, spool = _dead(tmp_path)
    spool.unlink()
    spool.parent.rmdir()
    spool.parent.touch()
    assert simulation.recover() is None


def test_an_engine_that_dies_while_it_cuts_a_log_leaves_that_to_the_next(tmp_path: Path) -> None:
    simulation, _ = _dead(tmp_path, Death(20, num_lines=1))
    found = simulation.recover()
    assert found is not None
    rest = (found.folder / TRACE_NAME).read_bytes()[found.end.num_bytes :]
    aside = found.folder / f"cut-{found.core.next_seq:012}"
    aside.write_bytes(rest[:5])
    found.last_segment(SYSTEM_DISK).close()
    assert aside.read_bytes() == rest != b""


_AFTER_A_DRAIN = Death(20, delivered=True)


def _dead(folder: Path, death: Death = _AFTER_A_DRAIN) -> tuple[CrashingSimulation, Path]:
    """An engine that died, and its spool."""
    simulation = dead_engine(folder, death)
    [spool] = (folder / "spool" / RUN).iterdir()
    return simulation, spool


@pytest.mark.parametrize(
    ("death", "has_loss"),
    [
        (Death(20), False),
        (Death(20, num_lines=0), False),
        (Death(20, num_lines=1), False),
        # A power failure has taken the end of the spool and not that of the log.
        (Death(20, spooled=0), True),
    ],
)
def test_it_is_known_whether_outputs_may_be_lost(death: Death, has_loss: bool, tmp_path: Path) -> None:
    simulation, _ = _run(tmp_path, "fcfs_one_replica", death)
    assert simulation.recovered is not None
    assert simulation.recovered.has_loss == has_loss
