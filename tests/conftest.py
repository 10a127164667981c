"""What all tests need: they leave nothing in the user's folders or for the tests after them, and share two cores."""

from __future__ import annotations

import ctypes.util
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

if ctypes.util.find_library("cuda") is None:
    # Before anything imports Triton: kernels for GPUs run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports torch, and for every process that a test starts: small tensors gain nothing by a second
# thread, and wait for it where the machine is busy.
os.environ["OMP_NUM_THREADS"] = "1"

# Before anything makes an HTTP client, and for every process that a test starts: each would read the authorities of the
# whole web, and none goes there. This file has one, which is nobody.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))

from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.system.collector import lasting_objects
from tests.cached_loggers import forget_cached_loggers

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# The same examples on every machine, however slow: a test that fails is one that the change has broken.
# --hypothesis-seed draws others.
settings.register_profile("eventlm", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eventlm")


# A shell makes the programs that it starts in the background ignore Ctrl-C; those that tests start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All libraries and tests are a million objects: to look for garbage among them takes seconds, then and later."""
    with lasting_objects():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that no process of pytest-xdist works on one when the others have finished."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session", autouse=True)
def _folders_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers record to a folder that goes with the tests, and cache there. Only models are the user's own.

    Each process of pytest-xdist has folders of its own.
    """
    home, models = tmp_path_factory.mktemp("home"), cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENTLM_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setenv("EVENTLM_HOME", str(home))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


# Not for the session: while playwright runs, no test in this process can run a loop of asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser without a window; skips where there is none."""
    from tests.browser import started_browser  # what few tests need is slow to import

    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module", autouse=True)
def _logging_of_their_own() -> Iterator[None]:
    """An `LLM` silences everything below warnings in its process, which other tests look for."""
    yield
    structlog.reset_defaults()
    forget_cached_loggers()
