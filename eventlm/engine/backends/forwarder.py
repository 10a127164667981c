"""Sends what the core forwards to the backends of all replicasets, and ends what does not count any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from eventlm.engine.backend import AttemptId
from eventlm.engine.backends.answers import Answer
from eventlm.engine.backends.backend_set import BackendSet
from eventlm.engine.backends.controller import BackendOwner
from eventlm.engine.setup import EngineSetup
from eventlm.events import Forwarded, Withdrawn
from eventlm.types import SequenceId


class HttpForwarder:
    """All sets of backends of an engine, by the number of the replicaset."""

    def __init__(self, setups: Sequence[EngineSetup], owner: BackendOwner) -> None:
        self.sets = {
            number: BackendSet(setup, owner, number=number, model=setup.core.models[0] if len(setups) > 1 else "")
            for number, setup in enumerate(setups)
            if setup.forwards
        }
        self._set_of_replica = {
            replica: self.sets[number]
            for number, setup in enumerate(setups)
            if setup.forwards
            for replica in range(setup.first_replica, setup.first_replica + setup.core.num_replicas)
        }
        #: The attempts of each sequence that may be under way, with their answer.
        self._under_way: dict[SequenceId, tuple[Answer, dict[int, int]]] = {}

    @property
    def is_up(self) -> bool:
        """Whether any backend takes requests."""
        return any(each.is_up for each in self.sets.values())

    def go_on(self, epochs: Sequence[int]) -> None:
        """As BackendSet.go_on."""
        for each in self.sets.values():
            each.go_on(epochs)

    async def start(self) -> None:
        """Ask all backends what they are."""
        await asyncio.gather(*(each.start() for each in self.sets.values()))

    def run(self) -> None:
        """The run has begun."""
        for each in self.sets.values():
            each.run()

    async def stop(self) -> None:
        """End all requests and connections."""
        await asyncio.gather(*(each.stop() for each in self.sets.values()))

    def forward(self, forwarded: Forwarded, answer: Answer) -> None:
        """As Forwarder.forward."""
        identity = SequenceId(forwarded.request, forwarded.index)
        _, replicas = self._under_way.setdefault(identity, (answer, {}))
        replicas[forwarded.attempt] = forwarded.replica
        self._set_of_replica[forwarded.replica].forward(
            forwarded.replica, AttemptId(*identity, forwarded.attempt), answer, forwarded.cached_tokens
        )

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """As Forwarder.withdraw."""
        name = AttemptId(withdrawn.request, withdrawn.index, withdrawn.attempt)
        self._set_of_replica[withdrawn.replica].end(withdrawn.replica, name)

    def finish(self, identity: SequenceId) -> None:
        """As Forwarder.finish."""
        _, replicas = self._under_way.pop(identity, (None, {}))
        for attempt, replica in replicas.items():
            self._set_of_replica[replica].end(replica, AttemptId(*identity, attempt))

    def can_continue(self, name: AttemptId) -> bool:
        """Whether a backend of the attempt's set can go on from what was shown of its answer."""
        answer, replicas = self._under_way.get(SequenceId(name.request, name.index), (None, {}))
        return answer is not None and self._set_of_replica[replicas[name.attempt]].can_continue(answer)
