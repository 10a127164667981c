"""The models that a server lists."""

from __future__ import annotations

from tests.server.conftest import RunningServer


def test_models(server: RunningServer) -> None:
    for path in ("/v1/models", "/models"):
        models = server.request("GET", path).json()
        assert models["object"] == "list"
        assert [(model["id"], model["object"], model["max_model_len"]) for model in models["data"]] == [
            ("test", "model", 256),
            ("org/test", "model", 256),
        ]
    assert server.request("GET", "/v1/models/org/test").json()["id"] == "org/test"
