"""What keeps `serve` and `generate` from starting is said in one line, at once, without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import ExitCode
from tests.checkpoints import edit_json, make_checkpoint, make_tokenizer
from tests.cli.conftest import RunHere, StartServer
from tests.models.families.proof import SMALL
from tests.models.families.proof import make_checkpoint as make_family
from tests.processes import PATIENCE_SECONDS, running_children
from tests.serving import command, run_command

ErrorOf = Callable[..., str]


def the_error(errors: str) -> str:
    """The only one, which comes last: a warning about an exposed server and such may come before it."""
    assert "Traceback" not in errors
    *_, last = errors.splitlines()
    assert last.startswith("eventlm: error: ")
    return last.removeprefix("eventlm: error: ")


@pytest.fixture
def error_of(run_here: RunHere) -> ErrorOf:
    """The error that a command line in `tmp_path` ends with, in this process. Its output is empty."""

    def run(*arguments: str, code: int = ExitCode.USAGE) -> str:
        exit_code, output, errors = run_here(*arguments)
        assert (exit_code, output) == (code, ""), errors
        return the_error(errors)

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A copy of a sound checkpoint, to be broken."""
    original = make_checkpoint(tmp_path_factory.mktemp("sound") / "model")

    def copy(folder: Path) -> Path:
        folder.mkdir()
        for path in original.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return folder

    return copy


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def scramble_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def point_to_lfs(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


def drop_a_tensor(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)


BREAKS: list[Any] = [
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    pytest.param(
        lambda folder: edit_json(folder / "config.json", model_type="mamba", architectures=["Mamba"]),
        "Mamba",
        # transformers is asked in a process of its own.
        marks=pytest.mark.soak,
    ),
    (cut_weights, "cut short or damaged"),
    (scramble_weights, "cut short or damaged"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    (lambda folder: point_to_lfs(folder / "model.safetensors"), "model.safetensors: this is a git-LFS pointer"),
    (lambda folder: point_to_lfs(folder / "config.json"), "config.json: this is a git-LFS pointer"),
    (lambda folder: point_to_lfs(folder / "tokenizer.json"), "tokenizer.json: this is a git-LFS pointer"),
    (drop_a_tensor, "is missing"),
    (lambda folder: edit_json(folder / "config.json", quantization_config={"quant_method": "hqq"}), "hqq"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text("[]"), "not a tokenizer"),
]


@pytest.mark.parametrize(("damage", "message"), BREAKS)
def test_a_broken_checkpoint(
    error_of: ErrorOf,
    tmp_path: Path,
    checkpoint: Callable[[Path], Path],
    damage: Callable[[Path], object],
    message: str,
) -> None:
    folder = checkpoint(tmp_path / "broken")
    damage(folder)
    error = error_of("serve", "--port", "0", "--model", str(folder))
    assert message in error
    assert str(folder) in error


def test_an_error_ends_workers_that_were_spawned_before_it(error_of: ErrorOf) -> None:
    before = running_children()
    error_of("serve", "--port", "0", "--model", "/nowhere", "--replicas", "2")
    assert running_children() == before


def test_an_error_ends_the_process(tmp_path: Path) -> None:
    done = run_command("serve", "--port", "0", "--model", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert str(tmp_path) in the_error(done.stderr)


def test_a_damaged_gguf_file(error_of: ErrorOf, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    error = error_of("serve", "--port", "0", "--model", str(file))
    assert f"{file}: cut short or damaged" in error
    assert "download it again" in error


def test_kernels_that_cannot_run_the_model(
    error_of: ErrorOf, tmp_path: Path, checkpoint: Callable[[Path], Path]
) -> None:
    folder = checkpoint(tmp_path / "float32")
    flags = ["--model", str(folder), "--cpu-kernels", "amx", "--port", "0"]
    error = error_of("serve", *flags)
    assert error.startswith("--cpu-kernels amx: not on this machine") or error.endswith(
        f"--cpu-kernels amx cannot run {folder}: it computes in bfloat16, not float32; use auto or torch"
    )


@pytest.mark.parametrize("dtype", ["half", "float32"])
def test_int8_in_another_type(
    error_of: ErrorOf, tmp_path: Path, checkpoint: Callable[[Path], Path], dtype: str
) -> None:
    """And before a model is looked for."""
    for model in (str(checkpoint(tmp_path / "model")), "/nowhere"):
        flags = ["--model", model, "--quantization", "int8", "--dtype", dtype]
        assert error_of("generate", "hi", *flags) == (
            "--quantization int8 computes in bfloat16 what it does not quantize; --dtype "
            f"{dtype.replace('half', 'float16')} cannot be combined with it; leave one of them out"
        )


def test_what_is_quantized_in_another_way(
    error_of: ErrorOf, tmp_path: Path, checkpoint: Callable[[Path], Path]
) -> None:
    folder = checkpoint(tmp_path / "hqq")
    edit_json(folder / "config.json", quantization_config={"quant_method": "hqq", "bits": 4})
    assert error_of("serve", "--port", "0", "--model", str(folder), "--quantization", "int8") == (
        f"{folder}/config.json: its weights are quantized (quantization_config: hqq in 4 bits), and of such "
        "checkpoints only those of gptq, awq, compressed-tensors, fp8, fbgemm_fp8, mxfp4 can be run; take one of "
        "these, or the model in bfloat16 or float16 (--quantization int8 quantizes it while it loads)"
    )


def test_what_is_no_checkpoint(error_of: ErrorOf, tmp_path: Path) -> None:
    for command_name, others in (("serve", ["--port", "0"]), ("generate", ["hi"])):
        for model, words in (("nowhere", "no such folder"), ("", "no config.json in this folder")):
            error = error_of(command_name, *others, "--model", str(tmp_path / model))
            assert words in error
    assert "did you mean smollm2?" in error_of("serve", "--port", "0", "--model", "smollm")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "edff"], "did you mean edf?"),
        (["--policy", "edf:multiplyer=2"], "multiplier"),
        (["--policy", "nowhere:Policy"], "no module 'nowhere'"),
        (["--fake", "bas_ns=1"], "--fake: unknown key 'bas_ns'; did you mean base_ns?"),
        (["--fake", "base_ns=soon"], "--fake: base_ns=soon: expected `int`, got `str`"),
        (["--predictor", "1,2"], "--predictor: a predictor has 5 non-negative integer coefficients"),
        (["--num-blocks", "4", "--max-model-len", "100"], "a context of 100 tokens needs 8 of 16 tokens, there are 4"),
        (["--cpu-kernels", "sse"], "--cpu-kernels 'sse': must be one of auto, amx, avx512, avx2, baseline, torch"),
        (["--quantization", "int3"], "--quantization 'int3': must be one of none, int8, int4"),
        (["--record-keep", "100MiB"], "--record-keep 100MiB is less than --record-segment 256MiB"),
        (
            ["--kv-parallel-size", "2", "--kv-shard-tokens", "100"],
            "--kv-shard-tokens 100 is no multiple of --block-size",
        ),
        (["--micro-batches", "2"], "--micro-batches 2: they are of a pipeline; give --pipeline-parallel-size as well"),
        (["--pipeline-parallel-size", "2", "--micro-batches", "4"], "--micro-batches 4: 2 stages have at most 3 steps"),
        (
            ["--pipeline-parallel-size", "2", "--max-decodes-in-flight-per-seq", "2"],
            "--max-decodes-in-flight-per-seq 2: the first stage of a pipeline needs the token that the last one draws",
        ),
        (["--tensor-parallel-size", "65"], "--tensor-parallel-size '65': must be an integer from 1 to 64"),
        (["--launcher", "raye"], "unknown launcher 'raye'"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1:0: Cannot assign requested address"),
    ],
)
def test_flags_that_make_no_sense(error_of: ErrorOf, flags: list[str], message: str) -> None:
    assert message in error_of("serve", "--model", "fake", "--port", "0", *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "5"], "4 query heads cannot be dealt out to 5 tensor ranks: lower"),
        (["--pipeline-parallel-size", "3"], "a model of 2 layers cannot have 3 stages: lower --pipeline-parallel-size"),
        pytest.param(
            ["--tensor-parallel-size", "2", "--model-impl", "transformers"],
            "a model that transformers computes runs in one worker: leave out --tensor-parallel-size",
            # It is asked in a process of its own.
            marks=pytest.mark.soak,
        ),
    ],
)
def test_ranks_that_a_model_cannot_have(
    error_of: ErrorOf, tmp_path: Path, checkpoint: Callable[[Path], Path], flags: list[str], message: str
) -> None:
    assert error_of("generate", "hi", "--model", str(checkpoint(tmp_path / "model")), *flags).startswith(message)


def test_ranks_of_a_model_with_a_norm_over_all_heads(error_of: ErrorOf, tmp_path: Path) -> None:
    make_family(tmp_path / "model", "Olmo2ForCausalLM", **SMALL)
    make_tokenizer(tmp_path / "model")
    flags = ["--model", str(tmp_path / "model"), "--tensor-parallel-size", "2"]
    assert error_of("generate", "hi", *flags) == (
        "layer 0 has one norm over the queries of all heads, which no tensor rank has: leave out --tensor-parallel-size"
    )


def test_a_cache_larger_than_memory_is_found_before_the_model_is_looked_for(error_of: ErrorOf) -> None:
    flags = ["--model", "/nowhere", "--kv-memory", "1024TiB"]
    error = error_of("generate", "hi", *flags)
    assert "--kv-memory 1024TiB: a KV cache of 1,073,741,824 MiB is more than all the memory here, which is" in error


@pytest.mark.parametrize("flag", ["--policy", "--batcher", "--router"])
def test_a_plugin_that_is_not_there_is_found_before_the_model_is_looked_for(error_of: ErrorOf, flag: str) -> None:
    assert "'nonsense'" in error_of("serve", "--model", "/nowhere", "--port", "0", flag, "nonsense")


def test_what_is_kept_matters_only_where_something_is_recorded(tmp_path: Path) -> None:
    flags = ["--model", "fake", "--max-tokens", "2", "--record-keep", "1KiB", "--no-record"]
    assert run_command("generate", "hi", *flags, cwd=tmp_path).returncode == 0


def test_a_config_with_a_typo(error_of: ErrorOf, tmp_path: Path) -> None:
    (tmp_path / "eventlm.toml").write_text("[model]\nmodel = 'fake'\nmax_model_length = 4\n")
    error = error_of("serve", "--config", "eventlm.toml")
    assert "max_model_length" in error
    assert "did you mean max_model_len?" in error


def test_a_config_with_a_quantization_that_is_none(error_of: ErrorOf, tmp_path: Path) -> None:
    for table, message in (
        ("quantization = 'int3'", "must be one of none, int8"),
        ("quantization = 'int8'\ndtype = 'float32'", "--dtype float32 cannot be combined with it"),
    ):
        (tmp_path / "eventlm.toml").write_text(f"[model]\nmodel = 'fake'\n{table}\n")
        assert message in error_of("generate", "hi", "--config", "eventlm.toml")


def test_a_taken_port_is_found_before_the_model_is_loaded(error_of: ErrorOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--model", "/nowhere", "--port", port]
        error = error_of("serve", *flags)
        assert "did you mean edf?" in error_of("serve", *flags, "--policy", "edff")
    assert error == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; another eventlm may be running there; give "
        f"another port, such as --port {int(port) + 1}, or --port 0 for one that is free"
    )


def test_a_folder_that_cannot_be_recorded_to(error_of: ErrorOf, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    error = error_of("serve", "--model", "fake", "--port", "0", "--record", "runs")
    assert error == "cannot record to runs: File exists; choose another folder"
    error = error_of("generate", "hi", "--model", "fake", "--record", "/proc/runs")
    assert error.startswith("cannot record to /proc/runs: ")
    (tmp_path / "models" / "latest").mkdir(parents=True)
    # Before the model is looked for, which may take long.
    flags = ("--model", str(tmp_path / "none"), "--port", "0", "--record", "models")
    error = error_of("serve", *flags)
    assert error == "cannot replace models/latest: Is a directory; choose another folder"


def test_a_server_that_everybody_can_reach_warns(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--host", "0.0.0.0")
    warning = "everyone who can reach 0.0.0.0:0 can use the server"
    assert warning in server.stderr
    assert server.stop() == 0
    guarded = start_server("--model", "fake", "--host", "0.0.0.0", environment={"EVENTLM_API_KEY": "k" * 8})
    assert warning not in guarded.stderr


def test_names_of_the_served_model(
    start_server: StartServer, checkpoint: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "Tiny-0.1M")
    assert start_server("--model", str(folder), "--kv-memory", "8MiB").model == "Tiny-0.1M"
    server = start_server("--model", "fake", "--served-model-name", "tiny")
    assert [model.id for model in server.client().models.list()] == ["tiny"]


def test_serving_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom eventlm.bootstrap.composition import compose\n"
        "import eventlm.server.http_server, eventlm.cli.serve.server\n"
        "from eventlm.config.load import load_config\ncompose(load_config(None, {'model': 'fake'}))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [*command()[:1], "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=os.environ
    )
    assert done.stdout == "[]\n", done.stderr
