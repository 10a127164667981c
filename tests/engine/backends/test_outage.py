"""Nobody waits for ever for a backend that does not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.engine.backend import BackendError
from eventlm.engine.request import EngineUnavailableError
from tests.engine.backends.engines import ask, forwarded_request, running_backends, submit
from tests.engine.backends.fake_backend import WORDS
from tests.engine.engines import verified
from tests.processes import until


async def test_what_waits_for_a_backend_fails_when_none_comes_back(tmp_path: Path) -> None:
    async with running_backends("a:1", record=tmp_path, outage_seconds=1) as (engine, backends):
        backends["a:1"].error = BackendError("no route", "connect")
        await until(lambda: not engine.has_worker)
        readers = [await submit(engine, forwarded_request(n=2)) for _ in range(2)]
        lines = await submit(engine, forwarded_request(offline=True))
        for reader in readers:
            with pytest.raises(EngineUnavailableError, match="no backend of the model 'm' is up"):
                await reader.done()
        assert not lines.task.done()
        backends["a:1"].error = None
        assert (await lines.done()).texts == ["".join(WORDS)]
        assert (await ask(engine, forwarded_request())).texts == ["".join(WORDS)]
    verified(engine)


async def test_a_short_outage_ends_nothing() -> None:
    async with running_backends("a:1", outage_seconds=3600) as (engine, backends):
        backends["a:1"].error = BackendError("no route", "connect")
        await until(lambda: not engine.has_worker)
        reader = await submit(engine, forwarded_request())
        backends["a:1"].error = None
        assert (await reader.done()).texts == ["".join(WORDS)]
