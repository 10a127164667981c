"""Which requests of a run come into another one."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from eventlm.engine.recovery.carrying_over import _obstacle
from eventlm.engine.setup import EngineSetup, StartedSet, make_header
from eventlm.engine.spool.records import KeptRequest
from eventlm.events import Header
from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import WorkerReady
from tests.engine.backends.engines import forwarded_request
from tests.engine.engines import fake_setup
from tests.made_requests import make_request


def renamed(*names: str) -> list[EngineSetup]:
    """Setups of replicasets that serve these models."""
    setup = fake_setup()
    return [structs.replace(setup, name=name, core=structs.replace(setup.core, models=[name])) for name in names]


def header(setups: list[EngineSetup], fingerprints: str = "") -> Header:
    """fingerprints: one letter for each model's."""
    letters = fingerprints or "x" * len(setups)
    ready = [WorkerReady(epoch=1, pid=1, model_fingerprint=letter) for letter in letters]
    others = [StartedSet(setup, [1] * 5, each) for setup, each in zip(setups[1:], ready[1:], strict=True)]
    return make_header(setups[0], "run", 1, [1] * 5, "default", ready[0], unix_start_ns=0, others=others)


def kept(model: str, **changes: Any) -> KeptRequest:
    request = make_request([1] * 8, SamplingParams(max_tokens=8)).with_scheduling(model=model)
    return KeptRequest(5, structs.replace(request, **changes), 1, "", "", [], [])


@pytest.mark.parametrize(
    ("before", "after", "model", "obstacle"),
    [
        (["a"], ["a"], "a", ""),
        # Under another name it is the same model.
        (["a"], ["b"], "a", ""),
        (["a", "b"], ["b", "a"], "b", ""),
        (["a", "b"], ["a"], "b", "the model 'b' is no longer served"),
        (["a"], ["a", "b"], "a", ""),
    ],
)
def test_a_request_goes_on_if_its_model_is_served(
    before: list[str], after: list[str], model: str, obstacle: str
) -> None:
    carried = Mock(header=header(renamed(*before)), damaged=set())
    setups = renamed(*after)
    assert _obstacle(kept(model), carried, header(setups), setups) == obstacle


def test_other_weights_are_another_model() -> None:
    carried = Mock(header=header(renamed("a"), "x"), damaged=set())
    setups = renamed("a")
    found = _obstacle(kept("a"), carried, header(setups, "y"), setups)
    assert found == "the model 'a' is no longer served"


def test_what_has_no_room_or_is_damaged_does_not_go_on() -> None:
    setups = renamed("a")
    small = [structs.replace(setups[0], core=structs.replace(setups[0].core, max_model_len=15))]
    carried = Mock(header=header(setups), damaged=set())
    assert _obstacle(kept("a"), carried, header(small), small) == "the context has 15 tokens now (--max-model-len)"
    forwarded = kept("a", forwarded=forwarded_request().forwarded)
    assert _obstacle(forwarded, carried, header(setups), setups) == "the model 'a' is served in another way"
    damaged = Mock(header=header(setups), damaged={5})
    assert _obstacle(kept("a"), damaged, header(setups), setups) == "another request of its reply was damaged"
