"""Runs of real models, executed again in this machine's workers: every token the same."""

from __future__ import annotations

import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.core.shards import Layout
from eventlm.errors import UsageError
from eventlm.kernels.cpu.native import available_builds, library_hash
from eventlm.models import transformers_model
from eventlm.models.cpu_kernels import choose_build
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.fetch.pull import cached
from eventlm.models.transformers_probe import probe_model
from eventlm.offline import LLM, SamplingParams
from eventlm.replay.execute.executable import check_executable
from eventlm.replay.execute.execution import execute
from eventlm.replay.execute.report import render
from eventlm.replay.verify.verifier import verify
from eventlm.worker.protocol import FAKE_MODEL, TORCH_BACKEND, backend_name, transformers_backend
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, make_tokenizer
from tests.models.families import proof
from tests.models.families.test_qwen_next import CASES as HYBRIDS
from tests.models.gguf.files import to_gguf
from tests.models.quantized.checkpoints import CASES as QUANTIZED
from tests.models.quantized.checkpoints import write_quantized
from tests.replay.traces import tampered

pytestmark = pytest.mark.long

#: Penalties, masks, noise and greedy rows in one batch, samples that share their prompt, ends of all kinds. Most run
#: to their last token, so that the small pools below are too small for certain, whatever is drawn.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.7, "presence_penalty": 0.3, "ignore_eos": True},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "n": 3, "ignore_eos": True},
    {"temperature": 0.8, "min_p": 0.05, "logprobs": 2, "stop": ["a", "the"]},
    {"temperature": 0.0, "min_tokens": 4, "prompt_logprobs": 1},
]


def record(folder: Path, model: str | Path, *, num_requests: int, max_tokens: int, **options: Any) -> Path:
    """Serve some prompts, half of which share a beginning, in a pool that is too small for all of them."""
    rng = random.Random(4)
    prompts = [
        "Once upon a time there was a log. " * (index % 2) + "x y " * rng.randint(1, 9) for index in range(num_requests)
    ]
    params = [SamplingParams(max_tokens=max_tokens, **PARAMS[index % len(PARAMS)]) for index in range(num_requests)]
    threads = {} if model == FAKE_MODEL else {"threads": 1}
    with LLM(model, record=folder, record_tokens=True, **threads, **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.run_folder is not None
        return Path(llm.run_folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A run with preemptions."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = {"max_model_len": 160, "num_blocks": 12, "block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    return record(folder, checkpoint, num_requests=20, max_tokens=24, predictor=[1000] * 5, **sizes)


def test_a_checkpoint_gives_the_same_tokens_again(tiny: Path, checkpoint: Path) -> None:
    assert '"t":"preempt"' in (tiny / "trace.jsonl").read_text()
    result = execute(tiny, model=str(checkpoint))
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_requests == 20
    assert result.num_tokens > 250
    assert verify(tiny).exit_code == 0


KV = {"kv_parallel_size": 2, "kv_shard_tokens": 32}
SPLIT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def record_ranks(folder: Path, model: str | Path, sizes: dict[str, int]) -> tuple[Path, Layout]:
    """A run of several ranks, and their layout."""
    options = {"max_model_len": 160, "num_blocks": 20, "block_size": 16, "max_num_batched_tokens": 48}
    run = record(
        folder, model, num_requests=12, max_tokens=16, max_num_seqs=8, predictor=[1000] * 5, **options, **sizes
    )
    layout = recorded_layouts(check_executable(run))[0]
    assert layout.num_ranks > 1
    return run, layout


@pytest.mark.parametrize("sizes", [SPLIT, KV])
def test_ranks_give_the_same_tokens_again(tmp_path: Path, sizes: dict[str, int]) -> None:
    """In as many as there were. In another number of stages too, but not where other parts are added up."""
    run, recorded = record_ranks(tmp_path, FAKE_MODEL, sizes)
    result = execute(run, model=FAKE_MODEL)
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_tokens > 100
    assert verify(run).exit_code == 0
    again = execute(run, model=FAKE_MODEL, layouts=[structs.replace(recorded, stages=3 - recorded.stages)])
    assert (again.mismatches, again.num_tokens) == ([], result.num_tokens)
    with pytest.raises(UsageError, match=r"--tensor-parallel-size 4: the run had \d tensor ranks?, and the sums of 4"):
        execute(run, model=FAKE_MODEL, layouts=[structs.replace(recorded, tensor=4)])


@pytest.mark.filterwarnings("ignore:threads 1 of each of")
@pytest.mark.parametrize(
    ("sizes", "num_stages"),
    [
        ({"tensor_parallel_size": 2}, 1),
        *(pytest.param(SPLIT, num_stages, marks=pytest.mark.soak) for num_stages in (1, 2)),
    ],
)
def test_ranks_of_a_checkpoint_give_the_same_tokens_again(
    tmp_path: Path, checkpoint: Path, sizes: dict[str, int], num_stages: int
) -> None:
    run, recorded = record_ranks(tmp_path, checkpoint, sizes)
    result = execute(run, model=str(checkpoint), layouts=[structs.replace(recorded, stages=num_stages)])
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_tokens > 100
    assert verify(run).exit_code == 0


#: Kernels, the type that is computed in, and that of the KV cache.
COMBINATIONS = [
    *product(("auto", *available_builds()[1:]), ("bfloat16",), ("auto", "int8", "fp8")),
    *product(("torch",), ("bfloat16", "float32"), ("auto", "bfloat16", "int8", "fp8")),
]
#: The others take long. int8 with compiled kernels is below, beside int8 weights.
AT_ONCE = ("torch", "float32", "fp8")


@pytest.mark.parametrize(
    ("kernels", "dtype", "kv_cache_dtype"),
    [pytest.param(*each, marks=[] if each == AT_ONCE else pytest.mark.soak) for each in COMBINATIONS],
)
def test_all_kernels_and_caches_give_the_same_tokens_again(
    tmp_path: Path, checkpoint: Path, kernels: str, dtype: str, kv_cache_dtype: str
) -> None:
    """With the kernels of the run, whichever are the fastest here; blocks are shared and given back."""
    options = {"max_model_len": 160, "num_blocks": 12, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    options |= {"cpu_kernels": kernels, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    run = record(tmp_path, checkpoint, num_requests=5, max_tokens=40, predictor=[1000] * 5, **options)
    assert '"t":"preempt"' in (run / "trace.jsonl").read_text()
    header = check_executable(run)
    assert header.config["worker"]["cpu_kernels"] == kernels
    assert header.config["cache"]["kv_cache_dtype"] == kv_cache_dtype
    build = choose_build(kernels)
    assert header.host["attention_backend"] == (backend_name(build) if build else TORCH_BACKEND)
    assert header.host.get("kernel_library") == (library_hash(build) if build else None)
    assert header.host["dtype"] == dtype
    result = execute(run, model=str(checkpoint))
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_tokens > 100


@pytest.mark.parametrize("block_size", [16, pytest.param(8, marks=pytest.mark.soak)])
def test_a_model_that_transformers_computes_gives_the_same_tokens_again(
    tmp_path: Path, checkpoint: Path, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With smaller blocks torch attends, beside compiled products."""
    # What a child tells of the model is tested elsewhere, and to import transformers once more takes long.
    monkeypatch.setattr(transformers_model, "_read", lambda folder, _: probe_model(folder))
    options = {"max_model_len": 160, "num_blocks": 12 * 16 // block_size, "max_num_batched_tokens": 48}
    options |= {"max_num_seqs": 16, "block_size": block_size, "model_impl": "transformers"}
    run = record(tmp_path, checkpoint, num_requests=5, max_tokens=40, predictor=[1000] * 5, **options)
    assert '"t":"preempt"' in (run / "trace.jsonl").read_text()
    header = check_executable(run)
    build = choose_build("auto")
    assert header.host["attention_backend"] == transformers_backend(build, attends=not build or block_size == 16)
    result = execute(run, model=str(checkpoint))
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_tokens > 100
    assert verify(run).exit_code == 0


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.soak)])
def test_int8_weights_keys_and_values_give_the_same_tokens_again(
    tmp_path: Path, checkpoint: Path, kernels: str
) -> None:
    options = {"max_model_len": 160, "num_blocks": 12, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    options |= {"cpu_kernels": kernels, "quantization": "int8", "kv_cache_dtype": "int8"}
    run = record(tmp_path, checkpoint, num_requests=5, max_tokens=40, predictor=[1000] * 5, **options)
    assert '"t":"preempt"' in (run / "trace.jsonl").read_text()
    header = check_executable(run)
    build = choose_build(kernels)
    assert header.host["attention_backend"] == (backend_name(build) if build else TORCH_BACKEND)
    assert (header.host["quantization"], header.host["dtype"]) == ("int8", "bfloat16")
    assert header.config["cache"]["kv_cache_dtype"] == "int8"
    result = execute(run, model=str(checkpoint))
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_tokens > 100


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize("recorded", [{"kernel_library": "0123456789abcdef"}, pytest.param({}, marks=pytest.mark.soak)])
def test_another_library_of_the_same_build_is_reported(
    tmp_path: Path, tiny: Path, checkpoint: Path, recorded: dict[str, str]
) -> None:
    """And that it is not known, of a version that did not name it."""
    run = Path(shutil.copytree(tiny, tmp_path / "run"))
    host = check_executable(run).host
    here = host.pop("kernel_library")
    tampered(run / "trace.jsonl", run / "trace.jsonl", lambda objects: objects[0].update({"host": host | recorded}))
    result = execute(run, model=str(checkpoint))
    difference = f"kernel_library: recorded {recorded.get('kernel_library', 'nothing')}, here {here}"
    assert (result.exit_code, result.host_differences) == (0, [difference])
    assert render(result).splitlines()[-1] == f"  {difference}"


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}


def unlike_llama(kind: str, folder: Path) -> Path:
    """A checkpoint that is computed by other operations than Llama's, or by other products."""
    match kind:
        case "AWQ":
            write_quantized(folder, QUANTIZED["awq"], vocab_size=VOCAB_SIZE)
        case "states":
            proof.make_checkpoint(folder, **proof.SMALL | HYBRIDS["qwen 3.5"] | {"vocab_size": VOCAB_SIZE})
        case _:
            fields = proof.SMALL | EXPERTS | {"vocab_size": VOCAB_SIZE}
            proof.make_checkpoint(folder, "Qwen3MoeForCausalLM", **fields)
    make_tokenizer(folder)
    if kind != "GGUF":
        return folder
    to_gguf(folder, folder / "model.gguf", "qwen3moe", "Q4_0")
    return gguf_folder(folder / "model.gguf")


@pytest.mark.parametrize(
    ("kind", "num_requests"),
    [("states", 4), ("GGUF", 4)]
    + [pytest.param(kind, 125, marks=pytest.mark.soak) for kind in ("experts", "states", "GGUF", "AWQ")],
)
def test_models_unlike_llama_give_the_same_tokens_again(tmp_path: Path, kind: str, num_requests: int) -> None:
    """With hits and preemptions; the long cases have 50,000 tokens."""
    model = unlike_llama(kind, tmp_path / "model")
    options: dict[str, Any] = {"max_model_len": 240, "num_blocks": 16, "dtype": "bfloat16"}
    options |= {"max_num_batched_tokens": 48, "max_num_seqs": 16}
    if kind == "states":
        options |= {"state_slots": 24, "state_interval": 16}
    run = record(tmp_path / "run", model, num_requests=num_requests, max_tokens=96, predictor=[1000] * 5, **options)
    assert '"t":"preempt"' in (run / "trace.jsonl").read_text()
    result = execute(run, model=str(model))
    assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
    assert result.num_tokens > 100 * num_requests
    assert verify(run).exit_code == 0


def test_another_checkpoint_is_refused(tiny: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path, dtype="bfloat16", seed=1)
    with pytest.raises(UsageError, match="is not the one that ran: its fingerprint is"):
        execute(tiny, model=str(other))


@pytest.mark.soak
def test_the_default_model_gives_the_same_tokens_again(tmp_path: Path) -> None:
    options = {"max_model_len": 256, "num_blocks": 24, "predictor": [1000] * 5}
    run = record(tmp_path, "smollm2", num_requests=5, max_tokens=8, **options)
    result = execute(run, model=str(cached("smollm2")))
    assert (result.exit_code, result.mismatches) == (0, [])
    assert result.num_tokens > 30
