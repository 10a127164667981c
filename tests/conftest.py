"""What all tests need: nothing of theirs ends up in the folders of whoever runs them, or in the tests after them."""

from __future__ import annotations

import ctypes.util
import os
import signal
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

if ctypes.util.find_library("cuda") is None:
    # Before anything imports Triton: kernels for GPUs run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

from eventlm.models.pull import cache_folder

# The same examples on every machine, however slow it is: a test that fails is one that its change has broken. Others
# are drawn with --hypothesis-seed.
settings.register_profile("eventlm", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eventlm")


# A shell has what it starts in the background ignore Ctrl-C, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _folders_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers record to a folder that goes with the tests, and cache there; only models are the user's own."""
    home, models = tmp_path_factory.mktemp("home"), cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENTLM_STATE", str(tmp_path_factory.mktemp("state") / "runs"))
        patch.setenv("EVENTLM_HOME", str(home))
        yield


@pytest.fixture(scope="module", autouse=True)
def _logging_of_their_own() -> Iterator[None]:
    """An `LLM` makes warnings the least that is logged in its program; what tests elsewhere look for would be lost."""
    yield
    structlog.reset_defaults()
