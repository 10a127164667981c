"""llama.cpp's endpoints of a real server, and its other names of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.described import assert_idle
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model", "fake", "--max-model-len", "1024", "--max-num-seqs", "3")
    with serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server
        assert_idle(server)


def post(server: Server, path: str, **body: Any) -> Any:
    return server.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})


def test_a_completion_with_timings(live: Server) -> None:
    body = {"prompt": "Hello", "n_predict": 6, "seed": 1, "cache_prompt": False}
    whole = post(live, "/completion", **body).json()
    *parts, last = post(live, "/completion", stream=True, **body).events()
    assert "".join(part["content"] for part in parts) == whole["content"]
    for reply in (whole, last):
        timings = reply["timings"]
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 6, 6)
        assert timings["prompt_ms"] > 0
        assert timings["predicted_per_second"] > 0


def test_a_grammar(live: Server) -> None:
    said = post(live, "/completion", prompt="Hello", grammar='root ::= "yes" | "no"', n_predict=9).json()
    assert said["content"] in ("yes", "no")
    assert said["stop_type"] == "eos"


def test_prompts_that_are_only_read(live: Server) -> None:
    read = post(live, "/completion", prompt="Hello", n_predict=0).json()
    assert (read["content"], read["tokens_predicted"], read["timings"]["prompt_n"]) == ("", 0, 6)


def test_slots_and_props(live: Server) -> None:
    assert live.request("GET", "/props").json()["total_slots"] == 3
    assert len(live.request("GET", "/slots").json()) == 3


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
def test_models(server: RunningServer, path: str) -> None:
    reply = server.request("GET", path).json()
    assert [model["id"] for model in reply["data"]] == ["test", "org/test"]
    assert reply["data"][0]["meta"] == {"n_vocab": 1024, "n_ctx_train": 0, "n_embd": 16, "n_params": 0, "size": 0}
    assert [model["name"] for model in reply["models"]] == ["test", "org/test"]
    assert reply["models"][0]["capabilities"] == ["completion", "embedding", "tools"]


def test_other_names(server: RunningServer) -> None:
    assert server.request("GET", "/v1/health").json() == server.request("GET", "/health").json()
    body = {"model": "test", "messages": [{"role": "user", "content": "hi"}]}
    said = server.post("/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert said == "Hello, world"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/infill", 404),
        ("POST", "/slots/0", 404),
        ("POST", "/lora-adapters", 405),
        ("POST", "/props", 405),
        ("POST", "/v1/rerank", 404),
        ("POST", "/models/load", 404),
    ],
)
def test_what_is_refused_by_name(server: RunningServer, method: str, path: str, status: int) -> None:
    reply = server.request(method, path, b"{}", {"Content-Type": "application/json"})
    assert_error(reply, status, INVALID, None, "not_supported", message="is not supported: ")


def test_a_model_s_path_without_v1_is_unknown(server: RunningServer) -> None:
    assert_error(server.request("GET", "/models/test"), 404, INVALID, code="unknown_url")
