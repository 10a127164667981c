"""What a server tells of itself, to whom, and what it keeps to itself."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.text.tokenizer import CheckpointTokenizer
from tests.processes import wait_until
from tests.server.auth.test_api_keys import bearer, write
from tests.server.checkpoints import byte_level
from tests.server.conftest import INVALID, RunningServer, assert_error

OPERATOR = """
[[keys]]
name = "operator"
key = "sk-operator"
scopes = ["inference", "admin"]
"""


def test_the_load_is_the_number_of_requests_that_generate(server: RunningServer) -> None:
    assert server.request("GET", "/load").json() == {"server_load": 0}
    server.engine.script_end = None
    server.engine.step_seconds = 0.005
    body = json.dumps({"model": "test", "prompt": "hi", "stream": True, "max_tokens": 200}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connections = [server.raw(f"{head}\r\n\r\n".encode() + body) for _ in range(2)]
    wait_until(lambda: server.request("GET", "/load").json() == {"server_load": 2})
    for connection in connections:
        connection.close()
    wait_until(lambda: server.request("GET", "/load").json() == {"server_load": 0})


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health(server: RunningServer, method: str) -> None:
    assert server.request(method, "/ping").json() == server.request("GET", "/health").json()
    server.engine.state = "dead"
    assert server.request(method, "/ping").status == 503


def test_the_configuration_has_no_secrets(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.toml", OPERATOR)
    server = start_server(api_key="sk-secret-1", api_keys_file=str(keys), max_connections=77)
    headers = bearer("sk-operator")
    text = server.request("GET", "/server_info", headers=headers)
    as_json = server.request("GET", "/server_info?config_format=json", headers=headers)
    assert (text.status, as_json.status) == (200, 200)
    for secret in (b"sk-secret-1", b"sk-operator"):
        assert secret not in text.data + as_json.data
    assert tomllib.loads(text.json()["vllm_config"])["server"]["max_connections"] == 77
    config = as_json.json()["vllm_config"]["server"]
    assert (config["max_connections"], config["api_key"]) == (77, "***")
    reply = server.request("GET", "/server_info?config_format=xml", headers=headers)
    assert_error(reply, 400, INVALID, param="config_format", code="invalid_value")


def test_the_tokenizer_is_shown_only_if_asked_for(server: RunningServer) -> None:
    reply = server.request("GET", "/tokenizer_info")
    assert_error(reply, 404, INVALID, code="unknown_url")


def test_the_tokenizers_configuration(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start_server(tokenizer_info=True)
    shown: dict[str, Any] = server.request("GET", "/tokenizer_info").json()
    assert shown["tokenizer_class"] == "FakeTokenizer"
    assert shown["chat_template"].startswith("{%- for message in messages")
    byte_level(tmp_path, tokenizer_class="PreTrainedTokenizerFast", name_or_path="/home/me/model", model_max_length=99)
    server.context.tokenizer = CheckpointTokenizer(tmp_path)
    shown = server.request("GET", "/tokenizer_info").json()
    assert (shown["tokenizer_class"], shown["model_max_length"]) == ("PreTrainedTokenizerFast", 99)
    assert shown["bos_token"] == "<s>"
    assert "name_or_path" not in shown
