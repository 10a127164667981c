"""Which keys vLLM's endpoints need, and what is said of those that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.auth.test_api_keys import bearer, write
from tests.server.conftest import INVALID, RunningServer, assert_error

KEYS = """
[[keys]]
name = "alice"
key = "sk-alice"

[[keys]]
name = "operator"
key = "sk-operator"
scopes = ["inference", "admin"]
"""

#: Each with what to use instead.
REFUSED = {
    "/score": "/v1/embeddings",
    "/v1/score": "/v1/embeddings",
    "/v2/rerank": "/v1/embeddings",
    "/classify": "structured_outputs.choice",
    "/v1/audio/transcriptions": "/v1/chat/completions",
    "/v1/audio/translations": "/v1/chat/completions",
    "/v1/audio/speech": "/v1/chat/completions",
    "/v1/images/generations": "/v1/chat/completions",
    "/v1/images/edits": "/v1/chat/completions",
    "/v1/moderations": "structured_outputs.choice",
    "/v1/realtime": '"stream": true',
    "/v1/realtime/sessions": '"stream": true',
    "/v1/fine_tuning/jobs": "eventlm serve FOLDER",
    "/v1/assistants": "/v1/responses",
    "/v1/threads/thread_1/runs": "/v1/responses",
    "/v1/uploads": "/v1/files",
    "/v1/vector_stores": "/v1/embeddings",
    "/v1/load_lora_adapter": "eventlm serve FOLDER",
}


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        ("GET", "/ping", (200, 200, 200)),
        ("POST", "/ping", (200, 200, 200)),
        ("GET", "/load", (200, 200, 200)),
        ("GET", "/tokenizer_info", (401, 200, 200)),
        ("GET", "/server_info", (401, 403, 200)),
        # The body is missing.
        ("POST", "/pooling", (401, 415, 415)),
        ("POST", "/invocations", (401, 415, 415)),
    ],
)
def test_the_key_that_each_needs(
    start_server: Callable[..., RunningServer],
    tmp_path: Path,
    method: str,
    path: str,
    statuses: tuple[int, int, int],
) -> None:
    keys = str(write(tmp_path / "keys.toml", KEYS))
    server = start_server(api_keys_file=keys, tokenizer_info=True)
    headers = [None, bearer("sk-alice"), bearer("sk-operator")]
    assert tuple(server.request(method, path, headers=each).status for each in headers) == statuses


@pytest.mark.parametrize(("path", "instead"), REFUSED.items())
def test_a_path_that_is_not_here_says_what_the_server_is_for(server: RunningServer, path: str, instead: str) -> None:
    for method in ("POST", "GET"):
        reply = server.request(method, path)
        message = f"{method} {path} is not supported: this server generates text and embeds it"
        assert_error(reply, 404, INVALID, code="not_supported", message=message)
        assert instead in reply.json()["error"]["message"]


def test_what_to_use_instead_is_served(server: RunningServer) -> None:
    served = server.request("GET", "/openapi.json").json()["paths"]
    assert {instead for instead in REFUSED.values() if instead.startswith("/")} <= served.keys()


@pytest.mark.parametrize("path", ["/v1/audiobooks", "/scores", "/v1"])
def test_other_paths_are_only_unknown(server: RunningServer, path: str) -> None:
    assert_error(server.request("GET", path), 404, INVALID, code="unknown_url", message=f"Invalid URL (GET {path})")
