"""The predictor's cache file: found again for the same model on the same machine, trusted only where it is sound."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from eventlm.engine.predictor import cache as module
from eventlm.engine.predictor.cache import PredictorCache, cpu_identity, predictor_cache
from eventlm.errors import CheckpointError
from eventlm.system.source_hash import source_hash
from eventlm.worker.protocol import WorkerSetup
from tests.checkpoints import make_checkpoint

MEASURED = [1_000_000, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def setup(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSetup:
    """Of a worker whose engine caches under `tmp_path`."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    return WorkerSetup(
        replica=0,
        epoch=1,
        model=str(checkpoint),
        block_size=16,
        num_blocks=64,
        max_model_len=520,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        threads=2,
    )


def written(setup: WorkerSetup) -> PredictorCache:
    cache = predictor_cache(setup)
    cache.write(MEASURED)
    return cache


def test_what_was_written_is_read_and_private(setup: WorkerSetup, tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert predictor_cache(setup).read() == []
        cache = written(setup)
        assert predictor_cache(setup).read() == MEASURED
    assert logs == []
    assert cache.path.parent == tmp_path / "home" / "predictor"
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]
    assert cache.path.stat().st_mode & 0o777 == 0o600
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 1},
        {"block_size": 32},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"cpu_kernels": "torch"},
        {"profile_ops": True},
        {"max_num_batched_tokens": 256},
        {"device": "cuda:0", "gpu": "NVIDIA H100"},
        {"attention_backend": "triton"},
        {"batch_invariant": True},
        {"torch_compile": True},
        {"graph_buckets": [1, 2]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_step_s_time_depends_on_is_a_key_of_its_own(setup: WorkerSetup, change: dict[str, Any]) -> None:
    written(setup)
    assert predictor_cache(structs.replace(setup, **change)).read() == []


def test_a_gpu_is_known_by_its_name_and_not_by_its_number(setup: WorkerSetup) -> None:
    first, second, other = (
        predictor_cache(structs.replace(setup, device=device, gpu=gpu)).path
        for device, gpu in (("cuda:0", "NVIDIA H100"), ("cuda:1", "NVIDIA H100"), ("cuda:0", "NVIDIA A10"))
    )
    assert first == second != other


def test_each_quantization_is_a_key_of_its_own(setup: WorkerSetup) -> None:
    """Where nothing else differs."""
    setup = structs.replace(setup, dtype="bfloat16")
    kinds = [{}, {"quantization": "int8"}, *({"kv_cache_dtype": name} for name in ("int8", "fp8"))]
    kinds.append({"quantization": "int8", "kv_cache_dtype": "int8"})
    assert len({predictor_cache(structs.replace(setup, **kind)).path for kind in kinds}) == len(kinds)


def test_another_model_is_a_key_of_its_own(setup: WorkerSetup, tmp_path: Path) -> None:
    written(setup)
    other = make_checkpoint(tmp_path / "other", seed=1)
    assert predictor_cache(structs.replace(setup, model=str(other))).read() == []


@pytest.mark.parametrize(
    "change", [{"num_blocks": 65}, {"num_blocks": 0}, {"max_model_len": 600}, {"dtype": "float32"}, {"epoch": 2}]
)
def test_what_changes_nothing_that_is_measured_is_the_same_key(setup: WorkerSetup, change: dict[str, Any]) -> None:
    written(setup)
    assert predictor_cache(structs.replace(setup, **change)).read() == MEASURED


@pytest.mark.parametrize("name", ["_torch_version", "_cpuinfo"])
def test_another_torch_or_processor_is_a_key_of_its_own(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written(setup)
    monkeypatch.setattr(module, name, lambda: "model name : other")
    assert predictor_cache(setup).read() == []


@pytest.mark.parametrize("changed", ["worker/sampling/sampler.py", "models/decoder.py", "core/predictor.py"])
def test_a_changed_source_is_another_code(tmp_path: Path, changed: str) -> None:
    package = Path(module.__file__).parents[2]
    # The kernels are behind a link in a checkout, and a folder where the package is installed.
    for part in ("worker", "models", "kernels", "core", "engine"):
        shutil.copytree(package / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_hash(tmp_path, module._CODE) == source_hash(package, module._CODE)
    source_hash.cache_clear()
    with (tmp_path / changed).open("a") as file:
        file.write("# another line\n")
    assert source_hash(tmp_path, module._CODE) != source_hash(package, module._CODE)


def test_the_processor_is_identified_by_its_kind_alone() -> None:
    first = "processor : 0\nmodel name\t: A\ncpu MHz : 1000.1\nflags : avx2\n\nprocessor : 1\nmodel name : A\n"
    assert cpu_identity(first) == cpu_identity(first.replace("1000.1", "3000.7"))
    assert cpu_identity(first) != cpu_identity(first.replace("avx2", "avx2 avx512f"))
    assert cpu_identity("CPU part : 0xd0c\n") != cpu_identity("CPU part : 0xd40\n")
    assert cpu_identity("") == cpu_identity("bogus")


def damaged(content: bytes) -> list[bytes]:
    """What must not be believed, made of a sound file."""
    sound = json.loads(content)
    others: list[Any] = [
        [],
        {**sound, "coefficients": [1, 2, 3]},
        {**sound, "coefficients": [-1, 2, 3, 4, 5]},
        {**sound, "coefficients": [0, 0, 0, 0, 0]},
        {**sound, "coefficients": [2**53 + 1, 2, 3, 4, 5]},
        {**sound, "coefficients": [1.5, 2, 3, 4, 5]},
        {**sound, "key": {**sound["key"], "threads": 64}},
        {**sound, "key": {**sound["key"], "more": 1}},
    ]
    return [b"", b"\xff\x00", content[:-10], content + b" " * 20_000, *(json.dumps(one).encode() for one in others)]


def test_a_broken_or_foreign_file_is_reported_once_and_replaced(setup: WorkerSetup) -> None:
    cache = written(setup)
    for content in damaged(cache.path.read_bytes()):
        cache.path.write_bytes(content)
        with capture_logs() as logs:
            assert cache.read() == []
        assert [(line["log_level"], line["file"]) for line in logs] == [("warning", str(cache.path))]
        cache.write(MEASURED)
        assert cache.read() == MEASURED


def test_an_unusable_folder_is_reported_once_and_costs_nothing(setup: WorkerSetup, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    cache = predictor_cache(setup)
    with capture_logs() as logs:
        cache.write(MEASURED)
    assert [line["event"] for line in logs] == ["the step times are not cached"]
    (tmp_path / "home").unlink()
    cache.path.mkdir(parents=True)
    with capture_logs() as logs:
        assert cache.read() == []
        cache.write(MEASURED)
    assert len(logs) == 2
    assert list(cache.path.parent.iterdir()) == [cache.path]


def test_files_are_few_and_the_one_unused_for_longest_goes(setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 3)
    caches = [predictor_cache(structs.replace(setup, threads=threads)) for threads in range(1, 5)]
    for age, cache in enumerate(caches[:3]):
        cache.write(MEASURED)
        os.utime(cache.path, (1000 + age, 1000 + age))
    (caches[0].path.parent / ".left-by-a-killed-engine.json").touch()
    os.utime(caches[0].path.parent / ".left-by-a-killed-engine.json", (1, 1))
    assert caches[0].read() == MEASURED
    caches[3].write(MEASURED)
    assert sorted(caches[0].path.parent.iterdir()) == sorted(caches[kept].path for kept in (0, 2, 3))


def test_a_checkpoint_that_cannot_be_read(setup: WorkerSetup, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        predictor_cache(structs.replace(setup, model=str(tmp_path / "none")))
