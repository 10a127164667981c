from __future__ import annotations

from unittest.mock import Mock

import pytest
from msgspec import structs

from eventlm.engine.recovery.fitting import fitting, is_own, takeover
from eventlm.engine.setup import EngineSetup, make_header
from eventlm.events import Header
from eventlm.worker.protocol import WorkerReady
from tests.engine.engines import fake_setup


def _header(setup: EngineSetup) -> Header:
    ready = WorkerReady(epoch=1, pid=1)
    return make_header(setup, "run", 1, [1, 2, 3, 4, 5], "default", ready, unix_start_ns=0)


def test_a_run_of_the_same_engine_fits_with_its_own_limits() -> None:
    setup = fake_setup()
    sized = structs.replace(setup, core=structs.replace(setup.core, num_blocks=40, max_model_len=128))
    for asked in (setup, structs.replace(setup, core=structs.replace(setup.core, num_blocks=0))):
        found = fitting(_header(sized), [asked])
        assert found is not None
        assert found[0].core == sized.core


@pytest.mark.parametrize(
    "other",
    [
        fake_setup(max_num_seqs=3),
        fake_setup(replicas=2),
        fake_setup(policy={"type": "edf"}),
        fake_setup(policy={"type": "edf", "multiplier": 2}),
    ],
)
def test_a_run_of_another_engine_does_not(other: EngineSetup) -> None:
    header = _header(other)
    assert fitting(header, [fake_setup()]) is None
    found = takeover(header, [fake_setup()], Mock())
    assert (found.builder is None, found.goes_on) == (header.plugins != _header(fake_setup()).plugins, False)
    assert fitting(_header(fake_setup()), [fake_setup(), fake_setup()]) is None


def test_another_version_follows_no_log() -> None:
    setup = fake_setup()
    header = structs.replace(_header(setup), code_version="another")
    assert fitting(header, [setup]) is None
    assert takeover(header, [setup], Mock()).builder is None


def test_a_limit_that_workers_may_lower_is_one() -> None:
    setup = fake_setup()
    model = structs.replace(setup.config.model, max_model_len=64)
    other = structs.replace(setup, config=structs.replace(setup.config, model=model))
    assert fitting(_header(setup), [other]) is None


def test_servers_of_one_folder_are_told_apart_by_their_addresses() -> None:
    setup = fake_setup()
    server = structs.replace(setup.config.server, port=setup.config.server.port + 1)
    other = structs.replace(setup, config=structs.replace(setup.config, server=server))
    assert is_own(_header(setup), [setup])
    assert not is_own(_header(setup), [other])
