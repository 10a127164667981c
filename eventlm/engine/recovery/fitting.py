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


def fitting(header: Header, setups: Sequence[EngineSetup]) -> list[EngineSetup] | None:
    """The setups with the limits of a run; None if it is the run of another kind of engine."""
    records = header.sets
    server = header.config.get("server", {})
    own = setups[0].config.server
    if len(records) != len(setups) or (server.get("host"), server.get("port")) != (own.host, own.port):
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
