"""Which run an engine of some setups can go on with, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.engine.live_requests import LiveRequests, make_live
from eventlm.engine.recovery.recover import Followers, RunBuilder
from eventlm.engine.setup import EngineSetup
from eventlm.engine.spool.records import SpoolHead
from eventlm.events import Header


def is_own(header: Header, setups: Sequence[EngineSetup]) -> bool:
    """Whether a run is of a server at the same address."""
    recorded, own = header.config.get("server", {}), setups[0].config.server
    return (recorded.get("host"), recorded.get("port")) == (own.host, own.port)


def fitting(header: Header, setups: Sequence[EngineSetup]) -> list[EngineSetup] | None:
    """The setups with the limits of a run; None if it has others or other plug-ins."""
    records = header.sets
    if len(records) != len(setups):
        return None
    fitting = []
    for record, setup in zip(records, setups, strict=True):
        core = structs.replace(setup.core, num_blocks=record.core.num_blocks, max_model_len=record.core.max_model_len)
        if core != record.core or setup.plugin_records != record.plugins:
            return None
        fitting.append(structs.replace(setup, core=core))
    return fitting


def builder(setups: Sequence[EngineSetup], make_followers: Callable[[], Followers]) -> RunBuilder:
    """Makes the parts of a run. setups: with its limits."""

    def make_core(header: Header, snapshot: bytes | None) -> Core:
        first, *others = [
            SetParts(setup.core, setup.plugins, Predictor.from_coefficients(record.predictor))
            for setup, record in zip(setups, header.sets, strict=True)
        ]
        if snapshot is None:
            return Core(*first, others)
        return Core.restored(first.config, first.plugins, snapshot, others)

    def make_requests(header: Header, head: SpoolHead) -> LiveRequests:
        return make_live(header, setups, block_names=head.block_names, digest_key=head.digest_key)

    return RunBuilder(make_core, make_requests, make_followers)
