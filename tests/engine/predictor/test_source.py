"""Where a run's coefficients come from: first the config, then the cache file, then a warm-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from eventlm.config import Config, SchedulerConfig, ServiceClass
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.predictor.fit import fit
from eventlm.engine.predictor.source import PredictorSource, flags_that_predict
from eventlm.engine.replicas.controller import ReplicaController
from eventlm.engine.setup import EngineSetup, make_setup, worker_setups
from eventlm.events import Header
from eventlm.system.system import real_system
from eventlm.worker.fake.model import fake_samples
from eventlm.worker.fake.tokens import FakeParameters
from eventlm.worker.protocol import StepSample, WorkerReady
from tests.checkpoints import make_checkpoint
from tests.engine.engines import FAKE, fake_setup, generate, recorded, request, running, verified

CHOSEN = [7, 7, 7, 7, 7]
SAMPLES = fake_samples(FakeParameters())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def setup(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSetup:
    """An engine's setup with a tiny checkpoint. It caches under `tmp_path`."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    fake = fake_setup(record=tmp_path / "runs", replicas=2)
    return make_setup(fake.config, model=str(checkpoint), model_name="m", num_blocks=64, max_model_len=512)


def source(setup: EngineSetup, **scheduler: Any) -> PredictorSource:
    return PredictorSource(Config(scheduler=SchedulerConfig(**scheduler)), worker_setups(setup)[0])


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "home").rglob("*.json"))


def test_what_is_measured_is_there_at_the_next_start(setup: EngineSetup, tmp_path: Path) -> None:
    first = source(setup)
    assert first.must_measure
    measured = first.coefficients(SAMPLES)
    assert first.origin == "warm-up"
    second = source(setup)
    assert not second.must_measure
    assert (second.coefficients([]), second.origin) == (measured, "cache")
    chosen = source(setup, predictor=CHOSEN)
    assert not chosen.must_measure
    assert (chosen.coefficients([]), chosen.origin) == (CHOSEN, "config")


def test_without_the_cache_nothing_is_read_or_written(setup: EngineSetup, tmp_path: Path) -> None:
    source(setup, predictor_cache=False).coefficients(SAMPLES)
    assert cached(tmp_path) == []
    source(setup).coefficients(SAMPLES)
    assert source(setup, predictor_cache=False).must_measure


@pytest.mark.parametrize(("samples", "origin"), [([], "default"), (SAMPLES[:3], "scaled")])
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_guess_is_no_measurement_and_says_so(
    setup: EngineSetup, tmp_path: Path, samples: list[StepSample], origin: str, has_cache: bool
) -> None:
    found = source(setup, predictor_cache=has_cache, policy={"type": "edf"})
    with capture_logs() as logs:
        assert (found.coefficients(samples), found.origin) == (fit(samples), origin)
    assert cached(tmp_path) == []
    [line] = logs
    assert line["log_level"] == "warning"
    assert line["event"].startswith("--policy edf goes by predicted step times, which are roughly estimated: ")
    assert f": {len(samples)} of at least 5 steps" in line["event"]
    assert "--predictor" in line["remedy"]
    assert "coefficients" not in line


def test_a_guess_that_nothing_goes_by_is_nothing_to_warn_of(setup: EngineSetup) -> None:
    with capture_logs() as logs:
        source(setup).coefficients(SAMPLES[:3])
    assert logs == [{"event": "step times estimated", "log_level": "info", "num_measured_steps": 3}]


def test_what_goes_by_predicted_times() -> None:
    assert flags_that_predict(Config()) == []
    scheduler = SchedulerConfig(policy={"type": "lpm"}, extra_policy=["fcfs", "lrs:x=1"], batcher={"type": "dynamic"})
    classes = {"slow": ServiceClass(priority=9), "late": ServiceClass(deadline_ms=9, drop_if_late=True)}
    assert flags_that_predict(Config(scheduler=scheduler, classes=classes)) == [
        "--extra-policy lrs:x=1",
        "--batcher dynamic",
        "--service-class late",
    ]


def test_a_measurement_is_nothing_to_warn_of(setup: EngineSetup) -> None:
    with capture_logs() as logs:
        source(setup).coefficients(SAMPLES)
        source(setup).coefficients([])
        source(setup, predictor=CHOSEN).coefficients([])
    assert {line["log_level"] for line in logs} == {"info"}


async def test_a_fake_worker_that_takes_no_time_is_a_constant_one(tmp_path: Path) -> None:
    async with running(record=tmp_path, fake={"base_ns": 0}, policy={"type": "lrs"}) as engine:
        await generate(engine, request(4))
    header = recorded(engine)[0]
    assert isinstance(header, Header)
    assert header.host["predictor"] == "warm-up"
    verified(engine)


def test_the_fake_model_is_never_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    found = source(fake_setup())
    assert found.must_measure
    found.coefficients(SAMPLES)
    assert not (tmp_path / "home").exists()


async def test_a_start_with_a_cache_file_does_no_warm_up(
    setup: EngineSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[WorkerReady] = []
    start = ReplicaController.start

    async def note(self: ReplicaController, *, warm_up: bool, **others: None) -> WorkerReady:
        ready.append(await start(self, warm_up=warm_up))
        return ready[-1]

    monkeypatch.setattr(ReplicaController, "start", note)
    measured = source(setup).coefficients(SAMPLES)
    engine = InferenceEngine(setup, real_system())
    try:
        await engine.start()
        await generate(engine, request(4))
    finally:
        await engine.stop()
    [file] = cached(tmp_path)
    # The engine's own guess of them, before there was a worker, is what the worker says.
    key = json.loads(file.read_text())["key"]
    assert [(one.samples, one.model_fingerprint) for one in ready] == [([], key["model"])] * 2
    host = ready[0].host
    assert (host["dtype"], host["device"], host["torch"]) == (key["dtype"], key["device"], key["torch"])
    assert host["threads"] == key["threads"]
    header = recorded(engine)[0]
    assert isinstance(header, Header)
    assert (header.predictor, header.host["predictor"]) == (measured, "cache")
    verified(engine)


async def test_a_warm_up_s_samples_are_what_a_run_goes_by(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        pass
    header = recorded(engine)[0]
    assert isinstance(header, Header)
    assert (header.predictor, header.host["predictor"]) == (fit(fake_samples(FakeParameters(**FAKE))), "warm-up")


async def test_a_new_measurement_is_only_made_by_the_first_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    start = ReplicaController.start

    async def note(self: ReplicaController, *, warm_up: bool, **others: None) -> WorkerReady:
        asked.append((self.index, warm_up))
        return await start(self, warm_up=warm_up)

    monkeypatch.setattr(ReplicaController, "start", note)
    async with running(replicas=2):
        pass
    async with running(replicas=2, predictor=CHOSEN):
        pass
    assert asked == [(0, True), (1, False), (0, False), (1, False)]


def test_backends_are_not_measured() -> None:
    known = PredictorSource(Config(), None)
    assert not known.must_measure
    assert (known.coefficients([]), known.origin) == ([0, 50_000_000, 0, 0, 0], "default")
