"""What-ifs: what they repeat, what they change, what they leave out, and that they say how far they can be trusted."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.config.objectives import Objectives
from eventlm.core.plugin import Policy, SequenceView
from eventlm.errors import UsageError
from eventlm.events import Arrived, Finished, Header, Launched, WorkerLost, WorkerUp
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.rebuild import Changes
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.report import render, render_json
from eventlm.replay.what_if.what_if import NullTestError, what_if
from eventlm.replay.workload.workload import SequenceOutput
from eventlm.system.system import real_system
from eventlm.types import TimeWindow
from tests.bus.slow_disk import SlowDisk
from tests.engine.test_lagging_disk import Hesitant, threaded
from tests.replay.made_workloads import COST, MILLISECOND, PREDICTOR, make_engine
from tests.replay.traces import tampered
from tests.replay.what_if_runs import arrivals_of, events_of, made_run, metric_of, policy, requests_of, run_of, slower
from tests.simulation import Simulation
from tests.workload import Chaos, draw_machine

#: More prompts than a step takes, from time to time; some of them long.
BURSTS = [place // 6 * 90 + place % 6 for place in range(60)]


def record(folder: Path, seed: int, *, segment_bytes: int = 0) -> Path:
    """A random workload with all that may go wrong."""
    with LogWriter(real_system(), folder, f"seed-{seed}", segment_bytes=segment_bytes) as writer:
        Simulation(seed, writer=writer, chaos=Chaos(recoveries=seed % 3), check_every=0).run()
        return writer.run_folder


def test_with_its_own_cost_model_the_baseline_is_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    result = what_if(run, [policy("fcfs"), policy("lrs")], cost_model=COST)
    assert result.null is not None
    assert result.null.num_decisions > 300
    assert result.sets[0].fit is None
    for metric in result.comparison.metrics:
        assert metric.baseline == metric.recorded
        assert not metric.alternatives[0].is_significant
        assert not metric.alternatives[0].difference
    assert result.comparison.request_error == 0
    assert (result.comparison.won_lost[0].num_won, result.comparison.won_lost[0].num_lost) == (0, 0)
    assert result.comparison.won_lost[0].num_equal == len(BURSTS)


def test_a_fitted_model_comes_near(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    result = what_if(run, [policy("edf")])
    assert result.sets[0].fit is not None
    assert result.sets[0].fit.mean < 0.05
    for name in ("ttft_p50", "e2e_p50", "e2e_p99"):
        metric = metric_of(result, name)
        assert metric.error_bar is not None
        assert metric.baseline is not None
        assert metric.error_bar < 0.05 * metric.baseline


def test_errors_are_also_those_of_a_baseline_that_does_not_know_the_pace(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    alternatives = [policy("edf")]
    found = metric_of(what_if(run, alternatives), "e2e_p99")
    assert found.recorded is not None
    assert found.baseline is not None
    assert found.baseline_unpaced is not None
    errors = [abs(each - found.recorded) / found.recorded for each in (found.baseline, found.baseline_unpaced)]
    assert found.error_bar is not None
    assert found.error_bar >= max(errors) * found.baseline
    # There is one witness where the model does not follow the run.
    faster = [Alternative(speed_up_ppm=2_000_000)]
    for single in (what_if(run, faster), what_if(run, alternatives, cost_model=COST)):
        assert metric_of(single, "e2e_p99").baseline_unpaced is None


def test_a_cost_model_that_is_off_widens_the_error_bars(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    alternatives = [Alternative(num_replicas=2), policy("lrs")]
    right = what_if(run, alternatives, cost_model=COST)
    wrong = what_if(run, alternatives, cost_model=slower(COST, 20))
    for name in ("ttft_p50", "tpot_p50", "e2e_p50", "e2e_p99"):
        metric = metric_of(wrong, name)
        assert metric.recorded is not None
        assert metric.error_bar is not None
        assert metric.error_bar > 0.15 * metric.recorded
        assert metric_of(right, name).error_bar == 0
    assert wrong.comparison.request_error > 0.15
    num_significant = [
        sum(cell.is_significant for metric in found.comparison.metrics for cell in metric.alternatives)
        for found in (right, wrong)
    ]
    assert num_significant[1] < num_significant[0]


def test_requests_whose_length_is_not_known_neither_win_nor_lose(tmp_path: Path) -> None:
    run = made_run(tmp_path, 5, num_requests=60, max_queue_len=3, max_num_seqs=2)
    result = what_if(run, [Alternative(num_replicas=3), Alternative(changes=Changes(settings={"max_queue_len": 100}))])
    events = events_of(run)
    rejected = {event.request for event in events if type(event).__name__ == "Rejected"}  # type: ignore[attr-defined]
    cut = {event.request for event in events if isinstance(event, Finished) and event.reason == "cancelled"}
    assert rejected
    assert cut
    assert result.comparison.num_censored == len(rejected | cut)
    for counts in result.comparison.won_lost:
        assert counts.num_censored >= len(rejected | cut)
        assert counts.num_won + counts.num_lost + counts.num_equal + counts.num_censored == 60
    metric = metric_of(result, "rejected")
    assert metric.recorded is not None
    assert metric.baseline is not None
    assert metric.error_bar is not None
    assert abs(metric.recorded - metric.baseline) <= metric.error_bar
    # With room in the queue all that fit into the context are served.
    assert metric.recorded > (metric.alternatives[1].value or 0)
    served = result.alternatives[1].outcome
    assert served.num_requests == 60
    assert served.output_tokens > result.recorded.output_tokens


@pytest.mark.parametrize("seed", range(3))
def test_an_alternative_that_serves_rejected_requests_is_predicted_within_the_bar(tmp_path: Path, seed: int) -> None:
    """A short queue turns away a fifth to a half of what comes. What a longer one would have shown is simulated with
    the true lengths, which the record does not have.
    """
    chance = random.Random(seed)
    now_ms, requests = 0.0, []
    for request in requests_of([0] * 150, output=80).requests:
        now_ms += chance.expovariate(1 / 20)
        length = min(1 + int(chance.expovariate(1 / 25)), 80)
        outputs = [SequenceOutput(worker_end=length, num_tokens=length)]
        requests.append(structs.replace(request, arrival_ns=round(now_ms * MILLISECOND), outputs=outputs))
    workload = structs.replace(requests_of([0]), requests=requests)
    run = run_of(tmp_path / "recorded", workload, max_num_seqs=2, max_queue_len=4)
    longer = policy("edf").changes
    alternative = Alternative(changes=structs.replace(longer, settings={"max_queue_len": 40}))
    objectives = Objectives(ttft=300)
    result = what_if(run, [alternative], cost_model=COST, objectives=objectives)
    assert 25 < (metric_of(result, "rejected").recorded or 0) < 90
    truth = outcome_of(run_of(tmp_path / "truth", workload, max_num_seqs=2, max_queue_len=40, policy="edf"), objectives)
    ttft, e2e = truth.latency("ttft"), truth.latency("e2e")
    assert ttft is not None
    assert e2e is not None
    true: dict[str, float | None] = {
        "ttft_p50": ttft.p50,
        "e2e_p50": e2e.p50,
        "requests_per_second": truth.requests_per_second,
        "slo_met": truth.objectives_met_ppm,
        "rejected": sum(truth.reject_reasons.values()),
    }
    num_within = 0
    for name, value in true.items():
        metric = metric_of(result, name)
        cell = metric.alternatives[0]
        assert value is not None
        assert metric.baseline is not None
        assert cell.value is not None
        assert cell.error_bar is not None
        num_within += abs(cell.value - value) <= cell.error_bar
        if cell.is_significant:
            assert (cell.value > metric.baseline) == (value > (metric.recorded or 0)), name
    assert num_within >= 4


@pytest.mark.parametrize("seed", range(2))
def test_noise_in_durations_widens_the_bars_so_far_that_they_hold_the_truth(tmp_path: Path, seed: int) -> None:
    """Every length is known; the truth has the same costs and other noise."""
    chance = random.Random(seed)
    requests = [
        structs.replace(each, outputs=[SequenceOutput(worker_end=length, num_tokens=length)])
        for each in requests_of([0] * 120, output=60).requests
        for length in [chance.randrange(5, 60)]
    ]
    workload = structs.replace(requests_of([0]), requests=requests)
    noisy = structs.replace(COST, ratios_ppm=[700_000, 900_000, 1_000_000, 1_400_000], seed=seed)

    def run_with(noise: int, **options: object) -> Path:
        cost = structs.replace(noisy, seed=noise)
        folder = tmp_path / f"{noise}"
        engine = make_engine(**options)
        return Path(simulate(workload, engine, cost, predictor=PREDICTOR, closed_loop=8, record=folder).run_folder)

    wider = Alternative(changes=Changes(settings={"max_num_seqs": 6}), closed_loop=8)
    result = what_if(run_with(10 * seed, max_num_seqs=3), [wider])
    truths = [outcome_of(run_with(10 * seed + index, max_num_seqs=6), Objectives(ttft=100)) for index in range(1, 6)]
    num_within = 0
    for name in ("ttft_p50", "e2e_p50", "e2e_p90", "requests_per_second"):
        cell = metric_of(result, name).alternatives[0]
        assert cell.value is not None
        assert cell.error_bar is not None
        assert 0 < cell.error_bar < 0.25 * cell.value
        for truth in truths:
            value = truth.requests_per_second
            if name != "requests_per_second":
                latency, quantile = name.split("_")
                value = getattr(truth.latency(latency), quantile)
            num_within += abs(value - cell.value) <= cell.error_bar
    assert num_within >= 18


def outcome_of(run: Path, objectives: Objectives) -> RunOutcome:
    collector = OutcomeCollector(objectives)
    for event in events_of(run):
        collector.see(event)
    return collector.outcome()


def test_what_is_unfinished_at_the_end_is_censored(tmp_path: Path) -> None:
    whole = run_of(tmp_path, requests_of(BURSTS))
    lines = (whole / "trace.jsonl").read_bytes().splitlines(keepends=True)
    cut = [index for index, line in enumerate(lines) if b'"t":"arrive"' in line][40]
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b"".join(lines[: cut + 5]))
    result = what_if(torn, [Alternative(num_replicas=2)], cost_model=COST)
    num_unfinished = result.recorded.num_unfinished
    assert num_unfinished > 0
    assert result.comparison.num_censored == num_unfinished
    assert metric_of(result, "unfinished").recorded == num_unfinished
    assert metric_of(result, "unfinished").baseline == 0
    assert result.warnings


def test_turns_wait_for_the_end_of_the_turn_before(tmp_path: Path) -> None:
    workload = requests_of([0, 300], output=20)
    first, second = workload.requests
    # The second holds what the first has generated: a session that nobody has named.
    turn = structs.replace(second, parent=0, think_ns=40 * MILLISECOND)
    own = [*first.arrival.blocks, 5000]
    turn = structs.replace(turn, arrival=structs.replace(turn.arrival, blocks=own, prompt_tokens=125))
    first = structs.replace(first, outputs=[SequenceOutput(num_tokens=20, blocks=[5000])])
    run = run_of(tmp_path, structs.replace(workload, requests=[first, turn]))
    result = what_if(run, [policy("edf")], cost_model=slower(COST, 400), output=tmp_path / "out")
    for folder in (run, result.alternatives[0].run_folder):
        end_ns = next(event.ts for event in events_of(folder) if isinstance(event, Finished))
        assert arrivals_of(folder)[1].ts == end_ns + 40 * MILLISECOND
    recorded_ms, slow_ms = arrivals_of(run)[1].ts, arrivals_of(result.alternatives[0].run_folder)[1].ts
    assert slow_ms > 2 * recorded_ms


def test_arrivals_come_closer_together(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    twice = Alternative(speed_up_ppm=2_000_000)
    result = what_if(run, [twice], output=tmp_path / "out")
    before, after = arrivals_of(run), arrivals_of(result.alternatives[0].run_folder)
    assert [(event.ts - before[0].ts) // 2 for event in before] == [event.ts - after[0].ts for event in after]
    assert (metric_of(result, "ttft_p99").alternatives[0].difference or 0) > 0
    assert any("the baseline is under the recorded load" in note for note in result.notes)


def test_a_closed_loop_keeps_its_clients_busy(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    result = what_if(run, [Alternative(closed_loop=3)], cost_model=COST, output=tmp_path / "out")
    num_open = most = 0
    for event in events_of(result.alternatives[0].run_folder):
        num_open += isinstance(event, Arrived)
        num_open -= isinstance(event, Finished)
        most = max(most, num_open)
    assert most == 3
    assert result.alternatives[0].outcome.num_requests == len(BURSTS)


def test_more_replicas_come_up_with_the_first(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    result = what_if(run, [Alternative(num_replicas=3)], cost_model=COST, output=tmp_path / "out")
    events = events_of(result.alternatives[0].run_folder)
    ups = [event for event in events if isinstance(event, WorkerUp)]
    assert [(up.replica, up.epoch, up.ts) for up in ups] == [(replica, 1, ups[0].ts) for replica in range(3)]
    assert {event.replica for event in events if isinstance(event, Launched)} == {0, 1, 2}
    assert any("device, or cores, of its own" in note for note in result.alternatives[0].notes)


def test_external_facts_of_replicas_that_are_gone_are_left_out(tmp_path: Path) -> None:
    num_lost = 0
    for seed in range(24):
        machine = draw_machine(random.Random(seed), seed).core
        if machine.num_replicas == 1 or machine.max_tokens_per_row > 1:
            continue
        run = record(tmp_path, seed)
        lost = [event for event in events_of(run) if isinstance(event, WorkerLost) and event.replica]
        if not lost:
            continue
        num_lost += len(lost)
        result = what_if(run, [Alternative(num_replicas=1)], output=tmp_path / f"out-{seed}")
        simulated = events_of(result.alternatives[0].run_folder)
        assert {event.replica for event in simulated if isinstance(event, WorkerUp | WorkerLost)} == {0}
        if num_lost > 1:
            break
    assert num_lost


def test_fewer_blocks_preempt_and_cut_the_context(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS, output=60))
    result = what_if(run, [Alternative(changes=Changes(settings={"num_blocks": 17}))], cost_model=COST)
    assert (metric_of(result, "preemptions").alternatives[0].difference or 0) > 0
    assert result.alternatives[0].notes == ["the context is cut from 512 to 256 tokens; longer requests are rejected"]


def test_more_blocks_than_names_are_pointed_out(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of([0, 10]))
    result = what_if(run, [Alternative(changes=Changes(settings={"num_blocks": 600}))], cost_model=COST)
    assert result.alternatives[0].notes[0].startswith("the run kept the names of 512 blocks, and here are 600")


@pytest.mark.parametrize("seed", range(0, 24, 3))
def test_whatever_went_wrong_alternatives_come_to_an_end_and_verify(tmp_path: Path, seed: int) -> None:
    run = record(tmp_path, seed, segment_bytes=8192 if seed % 5 == 0 else 0)
    if events_or_header(run).core.max_tokens_per_row > 1:
        with pytest.raises(UsageError, match="speculation"):
            what_if(run, [policy("edf")])
        return
    alternatives = [policy("edf"), policy("lrs"), Alternative(num_replicas=4), Alternative(speed_up_ppm=3_000_000)]
    result = what_if(run, alternatives, output=tmp_path / "out")
    for each in result.alternatives:
        verified = verify(each.run_folder)
        assert (verified.exit_code, verified.warnings, verified.clean_end) == (0, [], True)
    assert all(cell.value == 0 for cell in metric_of(result, "unfinished").alternatives)


def events_or_header(run: Path) -> Header:
    """The header of a run in one file or several."""
    first = min(run.glob("trace*.jsonl"), key=lambda path: (path.name == "trace.jsonl", path.name))
    lines = first.read_bytes().splitlines(keepends=True)
    copy = run.parent / f"{run.name}-header"
    copy.mkdir(exist_ok=True)
    (copy / "trace.jsonl").write_bytes(lines[0])
    header = events_of(copy)[0]
    assert isinstance(header, Header)
    return header


def test_a_run_whose_beginning_is_not_kept_starts_cold(tmp_path: Path) -> None:
    seed = next(
        seed for seed in range(40) if events_or_header(record(tmp_path / "drawn", seed)).core.max_tokens_per_row == 1
    )
    run = record(tmp_path, seed, segment_bytes=8192)
    segments = sorted(run.glob("trace-*.jsonl"))
    result = what_if(segments[1], [policy("edf"), Alternative(num_replicas=3)], output=tmp_path / "out")
    assert result.null is None
    assert "the trace begins in the middle of the run, at event" in result.notes[0]
    assert result.baseline.outcome.num_requests == result.recorded.num_requests > 0
    for each in result.alternatives:
        assert verify(each.run_folder).exit_code == 0


def test_a_run_with_a_gap_has_no_null_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    num_gaps = 0
    for seed in range(12):
        writer = LogWriter(real_system(), tmp_path, f"{seed}", segment_bytes=8192)
        Simulation(seed, recorder=threaded(writer, Hesitant, disk=disk, seed=seed), check_every=0).run()
        if (
            verify(writer.run_folder).num_missing == 0
            or events_or_header(writer.run_folder).core.max_tokens_per_row > 1
        ):
            continue
        num_gaps += 1
        result = what_if(writer.run_folder, [policy("edf")], output=tmp_path / f"out-{seed}")
        assert result.null is None
        assert result.notes[0].startswith("no null test: the trace has a gap")
        assert any("has a gap" in warning for warning in result.warnings)
        assert verify(result.alternatives[0].run_folder).exit_code == 0
        if num_gaps == 2:
            return
    pytest.fail("too few runs have a gap")


def test_a_run_that_cannot_be_repeated_is_no_ground_for_a_what_if(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))

    def meddle(objects: list[dict[str, object]]) -> None:
        launch = next(item for item in objects[100:] if item["t"] == "launch")
        launch["predicted_ns"] = 1

    path = tampered(run / "trace.jsonl", tmp_path / "meddled.jsonl", meddle)
    with pytest.raises(NullTestError, match=r"the null test failed.*predicted_ns") as caught:
        what_if(path, [policy("edf")])
    assert caught.value.exit_code == 10


def test_a_run_without_requests_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of([0]))
    lines = (run / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "empty.jsonl").write_bytes(lines[0])
    with pytest.raises(UsageError, match=r"empty.jsonl: no request arrived in it.*; `eventlm trace ls` lists other"):
        what_if(tmp_path / "empty.jsonl", [policy("edf")])
    (tmp_path / "foreign.jsonl").write_text("arrival,tokens\n1,2\n")
    with pytest.raises(UsageError, match="is not a trace"):
        what_if(tmp_path / "foreign.jsonl", [policy("edf")])


#: What a policy was shown, at its first call.
SHOWN: list[list[object]] = []


class Spy(Policy, frozen=True, kw_only=True):
    """Serves in the order of arrival and notes what it sees."""

    def keys(self, sequences: Sequence[SequenceView], now_ns: int) -> list[int]:
        SHOWN.append([structs.asdict(view) for view in sequences])
        return [view.arrival_ns for view in sequences]


def test_a_policy_never_sees_how_much_a_request_will_produce(tmp_path: Path) -> None:
    seen = []
    for num_tokens in (3, 35):
        workload = requests_of([0] * 5, output=40)
        outputs = [SequenceOutput(worker_end=num_tokens, num_tokens=num_tokens)]
        requests = [structs.replace(request, outputs=outputs) for request in workload.requests]
        run = run_of(tmp_path / str(num_tokens), structs.replace(workload, requests=requests))
        SHOWN.clear()
        result = what_if(run, [policy(f"{__name__}:Spy")], cost_model=COST)
        assert result.alternatives[0].outcome.output_tokens == 5 * num_tokens
        seen.append(list(SHOWN))
    # Up to the first end, step by step, it is shown the same.
    assert seen[0][0] == seen[1][0]
    assert len(seen[0][0]) == 5
    assert len(seen[0]) > 1
    assert all(mine == other for mine, other in zip(*seen, strict=False))


def test_simulated_traces_say_what_they_are(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    result = what_if(run, [policy("edf", multiplier=2)], cost_model=COST, output=tmp_path / "out")
    header = events_of(result.alternatives[0].run_folder)[0]
    recorded = events_of(run)[0]
    assert isinstance(header, Header)
    assert isinstance(recorded, Header)
    assert header.run == f"{recorded.run}-what-if-edf-multiplier-2"
    simulated = header.host["simulated"]
    assert (simulated["run"], simulated["changes"]) == (recorded.run, "edf:multiplier=2")
    assert simulated["cost_model"]["base_ps"] == COST.base_ps
    assert (header.plugins[0].kind, header.plugins[0].name) == ("policy", "edf")
    assert header.plugins[0].parameters["multiplier"] == 2


def _outputs(run: Path, out: Path) -> tuple[str, str, list[bytes]]:
    result = what_if(run, [policy("edf"), policy("lrs"), Alternative(num_replicas=3)], output=out)
    traces = [(Path(each.run_folder) / "trace.jsonl").read_bytes() for each in result.alternatives]
    return render(result).replace(str(out), "OUT"), render_json(result).replace(str(out), "OUT"), traces


def test_the_same_bytes_come_out_twice_and_in_another_process(tmp_path: Path) -> None:
    run = made_run(tmp_path, 3)
    text, json, traces = _outputs(run, tmp_path / "one")
    assert (text, json, traces) == _outputs(run, tmp_path / "two")
    code = f"from pathlib import Path\nfrom {__name__} import _outputs\n"
    code += f"print(_outputs(Path({str(run)!r}), Path({str(tmp_path / 'three')!r})))"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str((text, json, traces))


def test_a_window_compares_the_requests_that_arrived_in_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    arrivals = sorted(arrival.ts for arrival in arrivals_of(run))
    window = TimeWindow(arrivals[12], arrivals[30])
    chosen = [ts for ts in arrivals if window.has(ts)]
    found = what_if(run, [policy("fcfs"), policy("lrs")], cost_model=COST, window=window)
    assert found.recorded.num_requests == sum(each.num_requests for each in found.comparison.classes) == len(chosen)
    assert 0 < len(chosen) < len(arrivals)
    for metric in found.comparison.metrics:
        assert metric.baseline == metric.recorded, metric.name
        assert not metric.alternatives[0].difference
    assert found.comparison.won_lost[0].num_equal == len(chosen)
    assert found.comparison.num_censored == 0
    # What came before took part: the window's requests met its queue.
    whole = what_if(run, [policy("fcfs")], cost_model=COST).recorded
    assert found.recorded.sequences == [each for each in whole.sequences if window.has(each.arrived_ns)]
    assert found.recorded.num_steps < sum(isinstance(event, Launched) for event in events_of(run))


def test_a_window_holds_the_same_requests_at_another_load(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    arrivals = sorted(arrival.ts for arrival in arrivals_of(run))
    window = TimeWindow(arrivals[12], arrivals[30])
    faster = Alternative(changes=Changes(), speed_up_ppm=4_000_000)
    found = what_if(run, [faster, Alternative(changes=Changes(), closed_loop=3)], cost_model=COST, window=window)
    for each in found.alternatives:
        assert each.outcome.num_requests == found.recorded.num_requests


def test_a_window_without_a_request(tmp_path: Path) -> None:
    run = run_of(tmp_path, requests_of(BURSTS))
    with pytest.raises(UsageError, match="no request arrived in the window"):
        what_if(run, [policy("lrs")], cost_model=COST, window=TimeWindow(10**17, None))
