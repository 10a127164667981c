from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Lfm2Config

from eventlm.bootstrap import cache_plan, composition, device
from eventlm.bootstrap.backends import AskedSet
from eventlm.bootstrap.composition import compose, compose_engine
from eventlm.config.backends import BackendSpec
from eventlm.config.load import load_config
from eventlm.engine.backend import BackendFacts
from eventlm.engine.backends.setup import FoundBackend
from eventlm.engine.setup import worker_setups
from eventlm.errors import CheckpointError, UsageError
from eventlm.kernels.cpu import native
from eventlm.models import transformers_model
from eventlm.models.transformers_model import AttentionCall, TransformersModel
from eventlm.models.transformers_probe import probe_model
from tests.bootstrap.fake_nvml import GIB, H100, gpu, install
from tests.checkpoints import edit_json, make_checkpoint
from tests.engine.backends.fake_backend import FakeBackends
from tests.kernels.cpu.decoders import Shape, write_checkpoint
from tests.models.quantized.checkpoints import CASES, write_quantized


def test_kernels_that_are_not_here_are_found_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", lambda: ["baseline"])
    config = load_config(None, {"model": "/nowhere", "cpu_kernels": "amx"}, environment={})
    with pytest.raises(
        UsageError, match=r"^--cpu-kernels amx: not on this machine, .*; available: auto, baseline, torch$"
    ):
        compose(config)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "float32"),
        ("quantization", "int8"),
        ("model_impl", "transformers"),
        ("kv_memory", "1GiB"),
        ("kv_cache_dtype", "int8"),
        ("threads", 1),
        ("pin_threads", True),
        ("cpu_kernels", "torch"),
        ("device", "cuda"),
        ("device", "cpu"),
        ("attention_backend", "triton"),
        ("gpu_memory_utilization", "0.5"),
        ("cuda_graphs", False),
        ("batch_invariant", True),
        ("torch_compile", True),
    ],
)
def test_what_only_weights_have_is_refused_with_the_fake_model(option: str, value: object) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(UsageError, match=rf"^{flag} is for a model with weights, but --model is 'fake'; leave it out"):
        compose(load_config(None, {"model": "fake", option: value}, environment={}))


def test_a_model_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No processor's kernels are chosen for it, and how large its cache is its workers find out."""
    install(monkeypatch, gpu(), gpu(free=GIB))
    monkeypatch.setattr(device, "missing_software", lambda: "")
    monkeypatch.setattr(composition, "choose_forward", None)
    folder = make_checkpoint(tmp_path)
    engine, warnings = compose_engine(load_config(None, {"model": str(folder), "replicas": 2}, environment={}))
    workers = worker_setups(engine.setup)
    assert [(worker.device, worker.num_blocks, worker.processors) for worker in workers] == [
        ("cuda:0", 0, []),
        ("cuda:1", 0, []),
    ]
    assert engine.setup.core.max_num_batched_tokens == 8192
    assert [f"other programs hold memory of GPU 1 ({H100})" in warning for warning in warnings] == [True]


def test_a_model_that_gpus_cannot_run_is_found_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "")
    folder = make_checkpoint(tmp_path)
    layers = ["conv", "full_attention"]
    Lfm2Config(architectures=["Lfm2ForCausalLM"], num_hidden_layers=2, layer_types=layers).save_pretrained(folder)
    with pytest.raises(UsageError, match=r"GPUs cannot run this Lfm2ForCausalLM: it has .*; take --device cpu$"):
        compose_engine(load_config(None, {"model": str(folder)}, environment={}))


def test_models_that_torch_does_not_compile_are_found_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "")
    folder = make_checkpoint(tmp_path / "plain")
    config = load_config(None, {"model": str(folder), "torch_compile": True}, environment={})
    compose_engine(config)
    edit_json(folder / "config.json", architectures=["MistralForCausalLM"], sliding_window=32)
    said = "^--torch-compile is for models like Llama and Qwen3 whose weights are not packed, and this "
    with pytest.raises(UsageError, match=f"{said}MistralForCausalLM has sliding windows; leave it out$"):
        compose_engine(config)
    write_quantized(tmp_path / "awq", CASES["awq"])
    wish = {"model": str(tmp_path / "awq"), "torch_compile": True}
    with pytest.raises(UsageError, match=f"{said}.* has packed weights; leave it out$"):
        compose_engine(load_config(None, wish, environment={}))


def test_why_no_gpu_is_taken_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "no triton")
    config = load_config(None, {"model": str(make_checkpoint(tmp_path))}, environment={})
    assert any(warning.endswith("is here: no triton") for warning in compose_engine(config)[1])


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 100,
}


@pytest.mark.skipif("baseline" not in native.available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "it computes in bfloat16, not float32"),
        ({"dtype": "float16"}, "it computes in bfloat16, not float16"),
        ({"dtype": "bfloat16", "block_size": 8}, "blocks of 8 tokens are not a multiple of 16"),
    ],
)
def test_kernels_that_cannot_run_the_model_are_found_before_its_weights(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    wish = {"model": str(tmp_path), "cpu_kernels": "baseline"} | options
    with pytest.raises(
        UsageError, match=rf"^--cpu-kernels baseline cannot run {tmp_path}: {message}; use auto or torch"
    ):
        compose(load_config(None, wish, environment={}))


def test_weights_are_checked_before_any_worker_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for kernels in ("auto", "torch"):
        with pytest.raises(CheckpointError, match=r"tensor model.embed_tokens.weight is missing \(12 are\); download"):
            compose(load_config(None, {"model": str(tmp_path), "cpu_kernels": kernels}, environment={}))


@pytest.fixture(scope="module")
def compilable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers tells of a folder is asked for once."""
    return write_checkpoint(tmp_path_factory.mktemp("compilable"), Shape())


@pytest.mark.skipif("baseline" not in native.available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bfloat16"}, ""),
        ({"dtype": "bfloat16", "replicas": 2}, "there are 2 compute threads, and fewer processors to keep them on"),
        ({"dtype": "bfloat16", "cpu_kernels": "torch"}, "torch's operations are used"),
        # What the compiled forward pass cannot run.
        ({"dtype": "float32"}, "torch's operations are used"),
        ({"dtype": "float32", "pin_threads": False}, ""),
        ({"dtype": "bfloat16", "model_impl": "transformers"}, ""),
        ({"dtype": "float32", "model_impl": "transformers"}, "torch's operations are used"),
    ],
)
def test_threads_that_are_not_pinned(
    options: dict[str, object], said: str, compilable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a child, which would import transformers once more.
    monkeypatch.setattr(transformers_model, "_read", lambda folder, _: probe_model(folder))
    monkeypatch.setattr("eventlm.bootstrap.num_workers.usable_cores", lambda: 8)
    monkeypatch.setattr("eventlm.engine.setup.spread_processors", lambda: [0])
    wish = {"model": str(compilable), "num_blocks": 300, "threads": 1, "pin_threads": True} | options
    engine, warnings = compose_engine(load_config(None, wish, environment={}))
    assert [warning.endswith(said) for warning in warnings] == [True] * bool(said)
    is_pinned = worker_setups(engine.setup)[0].processors == [0]
    assert is_pinned == (bool(wish["pin_threads"]) and options.get("replicas") is None)


def test_what_transformers_computes_is_refused_where_only_eventlm_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path)
    model = TransformersModel(
        architecture="OtherForCausalLM",
        vocab_size=384,
        hidden_size=64,
        max_position_embeddings=512,
        dtype="float32",
        num_weights=1 << 20,
        body="model",
        layers=(AttentionCall(num_heads=4, num_kv_heads=2, key_size=24, value_size=16),) * 3,
    )
    for module in (composition, cache_plan):
        monkeypatch.setattr(module, "read_served", lambda *_: model)
    wish = {"model": str(folder), "num_blocks": 8}
    engine, _ = compose_engine(load_config(None, wish, environment={}))
    assert (engine.setup.core.num_blocks, engine.setup.vocab_size) == (8, 384)
    with pytest.raises(UsageError, match=r"^--quantization is for models that eventlm computes"):
        compose_engine(load_config(None, wish | {"quantization": "int8"}, environment={}))
    install(monkeypatch, gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "")
    with pytest.raises(UsageError, match=r"OtherForCausalLM, and on processors only; take --device cpu$"):
        compose_engine(load_config(None, wish, environment={}))


def test_that_an_old_file_says_what_is_quantized_is_reported(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["gptq"])
    wish = {"model": str(tmp_path), "num_blocks": 100}
    told = "quantize_config.json says that the weights are quantized (gptq), and config.json does not"
    assert not any(told in warning for warning in compose_engine(load_config(None, wish, environment={}))[1])
    (tmp_path / "quantize_config.json").write_text(json.dumps(CASES["gptq"].config))
    edit_json(tmp_path / "config.json", quantization_config=None)
    assert any(told in warning for warning in compose_engine(load_config(None, wish, environment={}))[1])


def test_backends_beside_own_workers() -> None:
    url = "http://127.0.0.1:1"
    config = load_config(
        None, {"model": "fake", "replicas": 2, "replicasets": [f"b:backend={url}", "c:model=fake,served_model_name=c"]}
    )
    asked = AskedSet(
        [FoundBackend(BackendSpec(url=url), BackendFacts(kind="vllm", models=["m"]))],
        ["slow"],
        FakeBackends().connect,
        [],
    )
    engine, warnings = compose_engine(config, all_sets=True, backends={"b": asked})
    own, backends, _ = engine.setups
    assert [(each.name, each.core.models, each.forwards) for each in engine.setups] == [
        ("main", ["fake"], False),
        ("b", ["m"], True),
        ("c", ["c"], False),
    ]
    assert [each.first_replica for each in engine.setups] == [0, 2, 2 + backends.core.num_replicas]
    # Processes are counted without backends.
    assert [(each.first_worker, each.num_workers) for each in engine.setups] == [(0, 4), (2, 4), (2, 4)]
    assert [len(worker_setups(each)) for each in engine.setups] == [2, 0, 2]
    assert "replicaset b: slow" in warnings
    assert own.config.replicasets["b"]["backend"] == [url]


def test_only_a_server_has_backends() -> None:
    config = load_config(None, {"backend": ["http://127.0.0.1:1"]})
    with pytest.raises(UsageError, match="--backend is for `eventlm serve`: this command runs its own workers"):
        compose(config)
    with pytest.raises(UsageError, match="--hedge-ms is for backends, and there is none"):
        compose(load_config(None, {"model": "fake", "hedge_ms": 5}))
