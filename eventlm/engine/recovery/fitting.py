"""How an engine of some setups can take over from a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from eventlm._version import __version__
from eventlm.config.load import redacted
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.engine.live_requests import LiveRequests, make_live
from eventlm.engine.recovery.dead_run import Followers
from eventlm.engine.recovery.recover import RunBuilder, Takeover
from eventlm.engine.setup import EngineSetup
from eventlm.engine.spool.records import SpoolHead
from eventlm.events import Header

#: Sections of the configuration by which workers size their caches.
_SIZED_BY = ("model", "cache", "gpu", "replicasets")


def is_own(header: Header, setups: Sequence[EngineSetup]) -> bool:
    """Whether a run is of a server at the same address."""
    recorded, own = header.config.get("server", {}), setups[0].config.server
    return (recorded.get("host"), recorded.get("port")) == (own.host, own.port)


def fitting(header: Header, setups: Sequence[EngineSetup]) -> list[EngineSetup] | None:
    """The setups with the limits of a run; None if it has others or other plug-ins, or is of another version."""
    found = _with_limits_of(header, setups)
    config = redacted(setups[0].config)
    if found is None or any(header.config.get(section) != config.get(section) for section in _SIZED_BY):
        return None
    for own, setup in zip(found, setups, strict=True):
        # Workers say how large these are.
        asked = structs.replace(setup.core, num_blocks=own.core.num_blocks, max_model_len=own.core.max_model_len)
        if asked != own.core:
            return None
    return found


def takeover(header: Header, setups: Sequence[EngineSetup], make_followers: Callable[[], Followers]) -> Takeover:
    """How an engine of these setups can take over from a run."""
    own = _with_limits_of(header, setups)
    return Takeover(None if own is None else _builder(own, make_followers), goes_on=fitting(header, setups) is not None)


def _with_limits_of(header: Header, setups: Sequence[EngineSetup]) -> list[EngineSetup] | None:
    """The setups with all limits of a run; None if it has other plug-ins, or is of another version."""
    records = header.sets
    if header.code_version != __version__ or len(records) != len(setups):
        return None
    if any(setup.plugin_records != each.plugins for each, setup in zip(records, setups, strict=True)):
        return None
    return [structs.replace(setup, core=each.core) for each, setup in zip(records, setups, strict=True)]


def _builder(setups: Sequence[EngineSetup], make_followers: Callable[[], Followers]) -> RunBuilder:
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
