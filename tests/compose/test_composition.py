from __future__ import annotations

import pytest

from eventlm.compose.composition import compose
from eventlm.config.load import load_config
from eventlm.errors import UsageError
from eventlm.kernels.cpu import native


def test_kernels_that_are_not_here_are_found_before_the_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", lambda: ["baseline"])
    config = load_config(None, {"model": "/nowhere", "cpu_kernels": "amx"}, environment={})
    with pytest.raises(
        UsageError, match=r"^--cpu-kernels amx: not on this machine, .*; available: auto, baseline, torch$"
    ):
        compose(config)
