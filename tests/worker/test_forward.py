"""Which forward pass a worker gets, what is said of it, and what becomes of its weights."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.errors import CheckpointError, UsageError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.decoder import PARTS
from eventlm.sampling_params import SamplingParams
from eventlm.types import SequenceId
from eventlm.worker import forward as module
from eventlm.worker.model_runner import ModelRunner
from tests.checkpoints import VOCAB_SIZE, edit_json, make_checkpoint
from tests.kernels.cpu.decoders import Shape, write_checkpoint
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.reference import Schedule, make_runner

BUILDS_HERE = native.available_builds()
pytestmark = pytest.mark.skipif(not BUILDS_HERE, reason="no build of the forward pass is compiled")
NOT_USED = "the compiled forward pass is not used, torch's is several times slower: "

#: Loads a small checkpoint, so that all code is there, then another. Prints by how many bytes that raised the peak of
#: resident memory.
LOAD = """
import re, sys
from pathlib import Path
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.loader import load_cpu_decoder, load_decoder

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def load(folder):
    if sys.argv[3] == "torch":
        return load_decoder(folder)
    return load_cpu_decoder(folder, available_builds()[0], max_positions=256, num_threads=1)

small = load(sys.argv[1])
before = peak_bytes()
decoder = load(sys.argv[2])
print(peak_bytes() - before)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")


def runner_with(folder: Path, **changes: Any) -> ModelRunner:
    return make_runner(folder, **{"dtype": "auto", "block_size": 16, "num_blocks": 64} | changes)


def backend(folder: Path, **changes: Any) -> tuple[str, list[str]]:
    """The one that is chosen, and why it is not the compiled one, if that is said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        host = runner_with(folder, **changes).host_info()
    lines = said.getvalue().splitlines()
    assert all(line.startswith(NOT_USED) for line in lines)
    return host["attention_backend"], [line.removeprefix(NOT_USED) for line in lines]


def test_the_fastest_build_is_chosen(checkpoint: Path) -> None:
    assert backend(checkpoint) == (f"cpu_{BUILDS_HERE[0]}", [])


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_the_one_that_is_wanted(checkpoint: Path, build: str) -> None:
    assert backend(checkpoint, cpu_kernels=build) == (f"cpu_{build}", [])


def test_torch_s_if_that_is_wanted(checkpoint: Path) -> None:
    assert backend(checkpoint, cpu_kernels="torch") == ("torch_sdpa_gather", [])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_torch_s(checkpoint: Path, dtype: str) -> None:
    assert backend(checkpoint, dtype=dtype) == ("torch_sdpa_gather", [])


def test_a_block_size_that_it_cannot(checkpoint: Path) -> None:
    reason = "blocks of 4 tokens are not a multiple of 16"
    assert backend(checkpoint, block_size=4) == ("torch_sdpa_gather", [reason])


def test_heads_that_it_cannot(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Shape(head_dim=24))
    assert backend(folder) == ("torch_sdpa_gather", ["heads of 24 are not a multiple of 16 up to 512"])


def test_no_build(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", list)
    reason = "it is not compiled, or of another version; install eventlm again, where there is a C++ compiler"
    assert backend(checkpoint) == ("torch_sdpa_gather", [reason])


def test_one_that_is_wanted_and_cannot_be_had(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--cpu-kernels baseline cannot run .*: it computes in bfloat16, not float32"):
        runner_with(checkpoint, cpu_kernels="baseline", dtype="float32")
    with pytest.raises(UsageError, match=r"blocks of 4 tokens are not a multiple of 16; use auto or torch$"):
        runner_with(checkpoint, cpu_kernels="baseline", block_size=4)
    monkeypatch.setattr(native, "available_builds", lambda: ["avx2", "baseline"])
    with pytest.raises(UsageError, match=r"--cpu-kernels avx512: not on .*; available: auto, avx2, baseline, torch$"):
        runner_with(checkpoint, cpu_kernels="avx512")


def test_more_threads_than_the_system_gives(checkpoint: Path) -> None:
    """In a process of its own, for the limit stays."""
    program = (
        "import resource, sys;"
        "from eventlm.models.loader import load_cpu_decoder;"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30));"
        "load_cpu_decoder(sys.argv[1], 'baseline', max_positions=64, num_threads=1024)"
    )
    done = subprocess.run([sys.executable, "-c", program, checkpoint], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "this machine gives neither its weights nor 1024 threads their memory" in done.stderr.splitlines()[-1]


def test_a_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape())
    edit_json(tmp_path / "config.json", hidden_size=128)
    with pytest.raises(CheckpointError, match=r"has shape \[.*\], by config.json it is"):
        runner_with(tmp_path)


@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_rounded_once_and_vectors_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, tied: bool
) -> None:
    folder = make_checkpoint(tmp_path / "stored", dtype=stored, bias=True, tied=tied)
    rounded = make_checkpoint(tmp_path / "rounded", dtype="bfloat16", bias=True, tied=tied)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: values.bfloat16() if values.dim() == 2 else values for name, values in tensors.items()}
    save_file(tensors, rounded / "model.safetensors")
    logits = []
    for path, options in ((folder, {"dtype": "bfloat16"}), (rounded, {})):
        schedule = run_some(runner_with(path, **options), monkeypatch)
        assert schedule.runner.host_info()["attention_backend"] == f"cpu_{BUILDS_HERE[0]}"
        logits.append(torch.stack(schedule.logits[1, 0]))
    assert torch.equal(*logits)


def run_some(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """A prompt in two chunks, of which the first samples nothing, and decodes into a third block."""
    schedule = Schedule(runner, monkeypatch)
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    schedule.step(new=[new_sequence(1, prompt)], chunks=[(1, 0, 0, 13, 0)], blocks=[(0, 0, [5])])
    schedule.step(chunks=[(1, 0, 13, 17, 1)], blocks=[(0, 1, [3, 9])])
    schedule.decode({(1, 0): prompt}, 5)
    assert len(schedule.outputs[1, 0]) == 6
    return schedule


def test_the_file_may_go_once_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that is not the output matrix is kept, as long as the worker lives."""
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    expected = run_some(runner_with(folder), monkeypatch).logits[1, 0]
    runner = runner_with(folder)
    (folder / "model.safetensors").unlink()
    gc.collect()
    # What would take the place of memory that was given back.
    others = [torch.full((VOCAB_SIZE, 64), torch.nan, dtype=torch.bfloat16) for _ in range(64)]
    assert torch.equal(torch.stack(run_some(runner, monkeypatch).logits[1, 0]), torch.stack(expected))
    assert len(others) == 64


@pytest.mark.parametrize("kernels", ["compiled", pytest.param("torch", marks=pytest.mark.soak)])
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, kernels: str) -> None:
    shape = Shape(1024, 3072, 8192, num_heads=16, num_kv_heads=4, head_dim=64, num_layers=8)
    folder = write_checkpoint(tmp_path, shape, max_positions=256)
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert file_bytes > 200e6
    assert peak_of_loading(folder, kernels) < 1.1 * file_bytes


def peak_of_loading(folder: Path, kernels: str) -> int:
    """Bytes, in a process of its own."""
    small = write_checkpoint(folder / "small", Shape())
    command = [sys.executable, "-c", LOAD, small, folder, kernels]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.fullmatch(r"\d+\n", done.stdout), done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("kernels", [pytest.param("compiled", marks=pytest.mark.soak), "torch"])
def test_shards_are_not_held_beside_the_weights(tmp_path: Path, kernels: str) -> None:
    """The largest tensor comes last, when all others have their place."""
    shape = Shape(1024, 2048, 24_576, num_heads=8, num_kv_heads=2, head_dim=64, num_layers=4, tied=True)
    single = write_checkpoint(tmp_path, shape, max_positions=256) / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    largest = "model.embed_tokens.weight"
    assert largest == max(tensors, key=lambda name: tensors[name].nbytes)
    shards = {name: f"{2 if 'layers.3' in name else 1}-of-3.safetensors" for name in tensors}
    shards[largest] = "3-of-3.safetensors"
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert num_bytes > 100e6
    assert peak_of_loading(tmp_path, kernels) < 1.1 * num_bytes


def test_a_forward_pass_without_a_row_that_samples(checkpoint: Path) -> None:
    for build in BUILDS_HERE:
        runner = runner_with(checkpoint, cpu_kernels=build)
        assert isinstance(runner._forward, module.CpuForward)
        assert runner._forward.logits(torch.empty(0, 64)).shape == (0, VOCAB_SIZE)


def test_the_parts_of_a_compiled_step_are_timed(checkpoint: Path) -> None:
    runner = runner_with(checkpoint, profile_ops=True)
    step = launched(0, chunks=[(1, 0, 0, 9, 1)], blocks=[(0, 0, [0])])
    ops = runner.execute(step, payload(new_sequence(1, list(range(5, 14))))).ops
    assert {"qkv_proj", "attention", "gate_up_proj", "down_proj"} < set(ops)
    assert set(ops) <= {*PARTS, "prepare", "extras", "record"}


def test_threads_are_kept_on_the_processors_that_are_named(checkpoint: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    runner = runner_with(checkpoint, threads=2, processors=[allowed[0], allowed[-1]])
    # Threads of libraries may do what they like; the team's second member is one of the new ones.
    masks = [os.sched_getaffinity(int(task)) for task in set(os.listdir("/proc/self/task")) - before]
    assert {allowed[-1]} in masks
    assert os.sched_getaffinity(0) == set(allowed)
    assert runner.host_info()["threads"] == 2


def test_a_step_s_inputs_are_those_of_its_sequences(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random launches whose block tables grow and are written anew, as hits and recomputations do."""
    runner = runner_with(checkpoint)
    decoder = runner._forward._decoder  # type: ignore[attr-defined]
    seen: list[tuple[list[int], list[Any]]] = []
    monkeypatch.setattr(decoder, "_functions", Recorder(decoder._functions, seen))
    random_stream = random.Random(5)
    lengths: dict[int, int] = {}
    for step in range(60):
        new, decodes, chunks, blocks, forget = [], [], [], [], []
        if lengths and random_stream.random() < 0.2:
            gone = random_stream.choice(sorted(lengths))
            del lengths[gone]
            forget.append((gone, 0))
        for request in sorted(lengths):
            if random_stream.random() < 0.7:
                decodes.append((request, 0, lengths[request], 0))
        if len(lengths) < 6:
            request, length = 100 + step, random_stream.randint(1, 70)
            new.append(new_sequence(request, [random_stream.randrange(3, VOCAB_SIZE) for _ in range(length)]))
            start = random_stream.randrange(length)
            chunks.append((request, 0, start, length - start, 1))
            lengths[request] = length
        if not decodes and not chunks:
            continue
        for row, (request, *_) in enumerate([*decodes, *chunks]):
            # The whole table or its end.
            count = -(-lengths[request] // 16)
            first = 0 if row >= len(decodes) else random_stream.randrange(count)
            blocks.append((row, first, [random_stream.randrange(64) for _ in range(count - first)]))
        launch = launched(step, decodes=decodes, chunks=chunks, blocks=blocks, forget=forget)
        tokens = runner.execute(launch, payload(*new)).tokens
        rows = [(request, length - 1, 1) for request, _, length, _ in decodes]
        rows += [(request, start, count) for request, _, start, count, _ in chunks]
        held = [runner._table[SequenceId(request, 0)] for request, _, _ in rows]
        ids, steps = seen.pop()
        assert steps == [
            (start, count, sequence.block_table[: -(-(start + count) // 16)].tolist())
            for (_, start, count), sequence in zip(rows, held, strict=True)
        ]
        assert ids == [
            token
            for (_, start, count), sequence in zip(rows, held, strict=True)
            for token in sequence.token_ids[start : start + count]
        ]
        for (request, _, _), produced in zip(rows, tokens, strict=True):
            lengths[request] += len(produced)
        # Blocks for what comes next.
        lengths = {request: length for request, length in lengths.items() if length < 500}


class Recorder:
    """A library that notes what `eventlm_forward` reads: token ids, and rows with the blocks of their tokens."""

    def __init__(self, functions: Any, seen: list[tuple[list[int], list[Any]]]) -> None:
        self._functions = functions
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def eventlm_forward(
        self, handle: int, token_ids: int, num_rows: int, starts: int, counts: int, tables: int, *rest: int
    ) -> None:
        def numbers(address: int, count: int) -> list[int]:
            return list((ctypes.c_int32 * count).from_address(address))

        addresses = (ctypes.c_void_p * num_rows).from_address(tables)
        rows = [
            (start, count, numbers(address, -(-(start + count) // 16)))
            for start, count, address in zip(
                numbers(starts, num_rows), numbers(counts, num_rows), addresses, strict=True
            )
        ]
        self._seen.append((numbers(token_ids, sum(count for _, count, _ in rows)), rows))
        self._functions.eventlm_forward(handle, token_ids, num_rows, starts, counts, tables, *rest)


def test_logits_are_written_only_for_those_that_need_them(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences side by side; what they draw does not depend on it."""
    runner = runner_with(checkpoint)
    num_calls = 0
    logits = runner._forward.logits

    def counted(hidden: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return logits(hidden)

    monkeypatch.setattr(runner._forward, "logits", counted)

    def run(request: int, *others: SamplingParams) -> tuple[list[list[int]], list[Any], int]:
        """Tokens and extras of a step, the first sequence's own first, and how often logits were written."""
        before = num_calls
        all_params = [SamplingParams(temperature=0.8, seed=3), *others]
        new = [
            new_sequence(request, [5, 6, 7 + index], index=index, num_prompt_tokens=3, params=params)
            for index, params in enumerate(all_params)
        ]
        chunks = [(request, index, 0, 3, 1) for index in range(len(new))]
        blocks = [(index, 0, [index]) for index in range(len(new))]
        output = runner.execute(launched(request, chunks=chunks, blocks=blocks), payload(*new))
        return output.tokens, output.extras, num_calls - before

    greedy = SamplingParams(temperature=0.0)
    (alone, *_), extras, count = run(1, greedy)
    assert (extras, count) == ([], 0)
    needing = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(top_k=3),
        SamplingParams(min_tokens=4, eos_token_ids=(2,)),
        SamplingParams(repetition_penalty=1.2),
    ]
    for request, params in enumerate(needing, start=2):
        (first, *others), extras, count = run(request, greedy, params)
        assert count == 1
        assert first == alone
        if params.logprobs is None:
            assert not extras
            continue
        (beside,) = extras
        assert beside.row == 2
        assert beside.logprobs is not None
        # A greedy token is the most likely.
        assert beside.logprobs.ranks == [1]
        assert [ids[0] for ids in beside.logprobs.top_ids] == others[1]
