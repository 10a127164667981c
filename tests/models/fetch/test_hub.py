"""Fetching repositories: from a hub on the loopback, and from a cache without any."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.errors import ExitCode, PullError
from eventlm.models.fetch.hub import is_repo_id, pull_repo
from eventlm.models.fetch.hub_snapshot import NoGgufError, choose_gguf
from eventlm.models.gguf.header import TENSOR_TYPES
from tests.models.hub_server import COMMIT, HubServer, make_cached
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until

INDEX = b'{"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": b"1" * 2000,
    "model-2.safetensors": b"2" * 1000,
    "consolidated.safetensors": b"3" * 3000,
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "original/config.json": b"{}",
    "README.md": b"# tiny",
}
WANTED = {
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-1.safetensors",
    "model-2.safetensors",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no setting of the user's."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(dict(FILES)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def error_of(repo_id: str, revision: str = "", code: ExitCode | None = None) -> str:
    with pytest.raises(PullError) as caught:
        pull_repo(repo_id, revision)
    assert code is None or caught.value.exit_code == code
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["acme/tiny", "Qwen/Qwen3-0.6B", "a/b", "HuggingFaceTB/SmolLM2-135M_x", "acme/tiny:Q4_K_M"]
)
def test_what_is_a_repository(text: str) -> None:
    assert is_repo_id(text)


@pytest.mark.parametrize(
    "text",
    ["smollm2", "./tiny", "../acme/tiny", "/acme/tiny", "a/b/c", "~/tiny", "a/", "é/b", "", "a/b:", "smollm2:bf16"],
)
def test_what_is_a_path(text: str) -> None:
    assert not is_repo_id(text)


def test_a_pull_fetches_what_is_read_once_and_no_code(hub: HubServer, cache: Path) -> None:
    folder = pull_repo("acme/tiny")
    assert folder == cache / "models--acme--tiny" / "snapshots" / COMMIT
    assert {path.name for path in folder.iterdir()} == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert not any("modeling" in path or path.endswith((".bin", "consolidated.safetensors")) for path in hub.requests)

    hub.requests.clear()
    assert pull_repo("acme/tiny", "v1") == folder
    assert not any("resolve" in path for path in hub.requests)


def test_the_single_file_where_there_is_no_index(hub: HubServer) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"1", "model.fp16.safetensors": b"2"}
    assert {path.name for path in pull_repo("acme/tiny").iterdir()} == {"config.json", "model.safetensors"}


GGUFS = {
    "tiny-Q4_K_M.gguf": b"4",
    "tiny-Q4_K_S.gguf": b"s",
    "tiny-BF16.gguf": b"b",
    "tiny-f16.gguf": b"f",
    "mmproj-F16.gguf": b"of pictures",
    "Q8_0/tiny-Q8_0-00001-of-00002.gguf": b"1",
    "Q8_0/tiny-Q8_0-00002-of-00002.gguf": b"2",
}


@pytest.mark.parametrize(
    ("quantization", "names"),
    [
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("F16", ["tiny-f16.gguf"]),
        ("bf1", ["tiny-BF16.gguf"]),
        ("Q8_0", ["Q8_0/tiny-Q8_0-00001-of-00002.gguf", "Q8_0/tiny-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_which_gguf_file_is_meant(quantization: str, names: list[str]) -> None:
    assert choose_gguf([*FILES, *GGUFS], quantization) == names


def test_a_gguf_file_by_its_quantization(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = FILES | GGUFS
    file = pull_repo("acme/tiny:q8_0")
    snapshot = cache / "models--acme--tiny" / "snapshots" / COMMIT
    names = sorted(name for name in GGUFS if name.startswith("Q8_0"))
    assert file == snapshot / names[0]
    assert sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()) == names
    assert [(snapshot / name).read_bytes() for name in names] == [GGUFS[name] for name in names]
    # Without asking, and without a network.
    assert pull_repo("acme/tiny:q8_0", may_fetch=False) == file
    with pytest.raises(PullError) as caught:
        pull_repo("acme/tiny:F16", may_fetch=False)
    incomplete = f"acme/tiny is not complete in the cache {cache}"
    assert str(caught.value) == f"{incomplete}; `eventlm pull acme/tiny:F16` fetches it"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert pull_repo("acme/tiny:q8_0") == file
    assert error_of("acme/tiny:F16", code=ExitCode.FAILED).startswith(f"{incomplete} and http://127.0.0.1:1 cannot be ")


def test_none_or_several_gguf_files(hub: HubServer) -> None:
    assert error_of("acme/tiny:Q4_0", code=ExitCode.USAGE) == "acme/tiny has no GGUF file; leave the quantization out"
    assert error_of("acme/nothing:Q5_0", code=ExitCode.USAGE).startswith(f"{hub.url} has no repository acme/nothing")
    hub.files = FILES | GGUFS
    assert error_of("acme/tiny:Q4_K", code=ExitCode.USAGE) == (
        "acme/tiny has several GGUF files of Q4_K: tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf; say more of the name"
    )
    with pytest.raises(NoGgufError) as caught:
        choose_gguf(GGUFS, "Q5_0")
    assert str(caught.value) == (
        "no GGUF file of Q5_0; it has Q8_0/tiny-Q8_0.gguf, tiny-BF16.gguf, tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf, "
        "tiny-f16.gguf"
    )


def test_unsupported_types_are_not_asked_for(hub: HubServer) -> None:
    for quantization in ("Q9_Z", "IQ1_S", "UD-IQ2_XXS", "iq3_m", "TQ1_0", "TQ2_0", "NVFP4", "Q40"):
        assert error_of(f"acme/tiny:{quantization}", code=ExitCode.USAGE) == (
            f"{quantization} is not a type of GGUF files that can be run (supported: {', '.join(TENSOR_TYPES)}, and "
            "mixtures of these such as Q4_K_M)"
        )
    assert hub.requests == []


def test_any_other_text_may_be_part_of_a_name(hub: HubServer) -> None:
    hub.files = {
        f"tiny-{name}.gguf": b"x" for name in ("Q8_0", "IQ4_XS", "UD-Q6_K_XL", "it-fp16", "XLQ4_K_M", "q9-Q5_0")
    }
    for text, name in (
        *(("q8", "Q8_0"), ("UD-Q6_K", "UD-Q6_K_XL"), ("iq4", "IQ4_XS"), ("y-it", "it-fp16")),
        *(("XLQ4_K_M", "XLQ4_K_M"), ("q9-Q5_0", "q9-Q5_0")),
    ):
        assert pull_repo(f"acme/tiny:{text}").name == f"tiny-{name}.gguf"
    assert error_of("acme/tiny:latest", code=ExitCode.USAGE).startswith("acme/tiny has no GGUF file of latest; it has ")


def test_a_name_without_a_type(hub: HubServer) -> None:
    hub.files = {"model.gguf": b"x"}
    assert pull_repo("acme/tiny:model").name == "model.gguf"
    assert error_of("acme/tiny:gemma-2b", code=ExitCode.USAGE) == (
        "acme/tiny has no GGUF file of gemma-2b; it has model.gguf"
    )


def test_the_token_is_sent_and_never_shown(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert "hf_canary" not in error_of("acme/private")
    assert hub.authorizations == {"Bearer hf_canary"}


def test_what_the_hub_refuses_is_one_line(hub: HubServer) -> None:
    missing = error_of("acme/nothing", code=ExitCode.USAGE)
    assert missing.startswith(f"{hub.url} has no repository acme/nothing, or does not show it without the right token")
    assert "set HF_TOKEN" in error_of("acme/private")
    assert error_of("acme/gated").startswith(f"acme/gated is gated: ask for access at {hub.url}/acme/gated")
    assert error_of("acme/tiny", "v2", ExitCode.USAGE).startswith(
        "acme/tiny has no revision 'v2': leave --revision out"
    )
    assert error_of("acme/a--b") == "acme/a--b is not the name of a repository, which is ORG/NAME"


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("config.json", "acme/tiny holds no config.json: choose a repository with"),
        ("model.safetensors.index.json", "acme/tiny holds no model.safetensors: choose a repository with"),
        ("model-2.safetensors", "acme/tiny holds no model-2.safetensors: choose a repository with"),
    ],
)
def test_a_repository_without_a_checkpoint(hub: HubServer, left_out: str, message: str) -> None:
    del hub.files[left_out]
    assert message in error_of("acme/tiny")


def test_offline_the_cache_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = make_cached(cache, {name: FILES[name] for name in WANTED})
    assert pull_repo("acme/tiny") == pull_repo("acme/tiny", COMMIT) == snapshot
    assert error_of("acme/tiny", "v1") == (
        f"acme/tiny at revision 'v1' is not complete in the cache {cache} and HF_HUB_OFFLINE forbids fetching it: "
        "unset HF_HUB_OFFLINE and run `eventlm pull acme/tiny --revision v1` once"
    )
    assert f"acme/other is not complete in the cache {cache}" in error_of("acme/other")
    (snapshot / "model-2.safetensors").unlink()
    assert "acme/tiny is not complete in the cache" in error_of("acme/tiny", code=ExitCode.FAILED)


def test_what_may_not_be_fetched_is_not_asked_for(hub: HubServer, cache: Path) -> None:
    with pytest.raises(PullError) as caught:
        pull_repo("acme/tiny", "v1", may_fetch=False)
    assert str(caught.value) == (
        f"acme/tiny at revision 'v1' is not complete in the cache {cache}; "
        "`eventlm pull acme/tiny --revision v1` fetches it"
    )
    assert hub.requests == []
    assert pull_repo("acme/tiny") == pull_repo("acme/tiny", may_fetch=False)


def test_without_a_network_the_cache_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        # It is taken, so nobody else listens there, and neither does this.
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert f"http://127.0.0.1:{port} cannot be reached (" in error_of("acme/tiny")
        snapshot = make_cached(cache, {name: FILES[name] for name in WANTED})
        assert pull_repo("acme/tiny") == snapshot


def test_a_cache_that_cannot_be_written(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "failed: " in error_of("acme/tiny")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("arguments", [["pull", "acme/tiny"], ["generate", "--model", "acme/tiny", "Hello"]])
def test_a_signal_ends_a_download_at_once(hub: HubServer, number: signal.Signals, arguments: list[str]) -> None:
    hub.stalls = True
    with subprocess.Popen(
        [sys.executable, "-m", "eventlm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert hub.asked_for_weights.wait(PATIENCE_SECONDS)
        [child] = children(process.pid)
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert output == b""
    assert b"Traceback" not in errors
    wait_until(lambda: not is_running(child))
