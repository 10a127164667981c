"""What clients read of models, by the official client's own types."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.models.facts import ModelFacts
from tests.server.conftest import RunningServer
from tests.server.ollama.clients import assert_ollama_error

FACTS = ModelFacts(
    embedding_size=16,
    family="llama",
    file_format="safetensors",
    weights="bfloat16",
    num_layers=30,
    num_parameters=134_515_008,
    num_bytes=269_060_552,
    context_length=8192,
)
DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "134.5M",
    "quantization_level": "BF16",
}


def test_tags_and_ps(start_with_ollama: Any) -> None:
    server, client = start_with_ollama(reasoning_parser="qwen3")
    server.context.facts = FACTS
    listed, running = client.list().models, client.ps().models
    for models in (listed, running):
        assert [model.model for model in models] == ["test:latest", "org/test:latest"]
        assert [model.details.model_dump() for model in models] == [DETAILS] * 2
        assert {model.size for model in models} == {FACTS.num_bytes}
        assert len({model.digest for model in models}) == 2
        assert all(len(model.digest) == 64 for model in models)
    assert [model.digest for model in listed] == [model.digest for model in running]
    assert running[0].context_length == 4096
    assert running[0].expires_at.year == 9999
    tags = server.request("GET", "/api/tags").json()["models"]
    assert tags[0]["name"] == "test:latest"
    assert tags[0]["capabilities"] == ["completion", "embedding", "tools", "thinking"]
    server.engine.state = "loading"
    assert client.ps().models == []


@pytest.mark.parametrize("body", [{"model": "test"}, {"name": "test:latest"}, {"model": "org/test", "verbose": True}])
def test_show(server: RunningServer, body: dict[str, Any]) -> None:
    server.context.facts = FACTS
    reply = server.post("/api/show", body).json()
    assert reply["details"] == DETAILS
    assert reply["capabilities"] == ["completion", "embedding", "tools"]
    assert "<|im_start|>" in reply["template"]
    assert ["temperature", "1.0"] in [line.split() for line in reply["parameters"].splitlines()]
    info = reply["model_info"]
    assert info.pop("general.basename") in ("test", "org/test")
    assert info == {
        "general.architecture": "llama",
        "general.parameter_count": FACTS.num_parameters,
        "llama.context_length": 256,
        "llama.embedding_length": 16,
        "llama.block_count": 30,
        "llama.vocab_size": 1024,
        "tokenizer.ggml.eos_token_id": 257,
    }


def test_show_through_the_official_client(start_with_ollama: Any) -> None:
    _, client = start_with_ollama()
    shown = client.show("test")
    assert shown.modelinfo["fake.context_length"] == 4096
    assert shown.modified_at is not None
    assert shown.modelfile == "FROM test\n"


@pytest.mark.parametrize(
    ("body", "status"), [({}, 400), ({"model": ""}, 400), ({"model": "x"}, 404), ({"model": 1}, 400)]
)
def test_show_of_what_is_not_there(server: RunningServer, body: dict[str, Any], status: int) -> None:
    assert_ollama_error(server.post("/api/show", body), status, "model")


def test_the_version_is_that_of_the_api_and_needs_no_key(start_server: Any) -> None:
    server = start_server(api_key="secret")
    version = server.request("GET", "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert server.request("HEAD", "/api/version").status == 200
    assert_ollama_error(server.request("GET", "/api/tags"), 401, "API key")
