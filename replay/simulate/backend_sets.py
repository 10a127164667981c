"""Replicasets of other servers in a simulation: their limits as a server would derive them, and their workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import UNSET, structs

from eventlm.config import Config, CoreConfig
from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import Backend, BackendFacts
from eventlm.engine.backends.setup import FoundBackend, make_backends_setup
from eventlm.engine.setup import EngineSetup
from eventlm.events import BackendUp
from eventlm.replay.cost.backend_model import AnyCost, BackendsCost
from eventlm.replay.simulate.backends import answer_of
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest


class BackendsSet(Protocol):
    """A replicaset of a simulated engine."""

    @property
    def setup(self) -> EngineSetup: ...

    @property
    def cost(self) -> AnyCost: ...


def backends_setup(
    config: Config, workload: Workload, cost: BackendsCost, *, model_name: str, recorded: CoreConfig | None
) -> EngineSetup:
    """The setup of a set of as many servers as there are replicas. Their caches hold what is configured, else what
    those of the run did that the workload is from. Raises UsageError as `make_backends_setup` does.
    """
    cache, num_backends = config.cache, config.scheduler.replicas
    num_blocks = cache.num_blocks
    if not num_blocks and recorded is not None and recorded.forwards is not UNSET:
        num_blocks = recorded.num_blocks
    longest = max(request.arrival.prompt_tokens + request.arrival.max_tokens for request in workload.requests)
    found = []
    for number in range(num_backends):
        server = cost.of(number)
        facts = BackendFacts(
            kind="openai",
            max_model_len=config.model.max_model_len or longest,
            max_concurrency=server.slots,
            cache_tokens=max(num_blocks - 1, 0) * cache.block_size,
        )
        found.append(FoundBackend(BackendSpec(url=f"http://{name_of(server.name, number)}"), facts))
    gateway = structs.replace(config.gateway, max_backends=num_backends)
    return make_backends_setup(
        structs.replace(config, gateway=gateway), found, model_name=model_name, connect=_no_client
    )


def name_of(name: str, number: int) -> str:
    """What a server is called where its model has no name."""
    return name or f"simulated-{number}"


def started_backends(sets: Sequence[BackendsSet]) -> dict[int, BackendUp]:
    """The facts with which the servers of an engine begin, by replica."""
    return {fact.replica: fact for fact in _started(sets)}


def _started(sets: Sequence[BackendsSet]) -> Iterator[BackendUp]:
    first = 0
    for each in sets:
        if isinstance(each.cost, BackendsCost):
            for number in range(each.setup.core.num_replicas):
                server = each.cost.of(number)
                yield BackendUp(
                    replica=first + number,
                    epoch=1,
                    name=name_of(server.name, number),
                    kind=server.kind,
                    max_concurrency=server.slots,
                )
        first += each.setup.core.num_replicas


def for_backends(workload: Workload, forwards: Sequence[bool]) -> Workload:
    """The workload with the requests of sets of other servers as these answer them: ends in the text, and grammars, are
    theirs. forwards: of each replicaset, whether it is one.
    """
    if not any(forwards):
        return workload
    requests = [_forwarded(each) if forwards[each.arrival.replicaset] else each for each in workload.requests]
    return structs.replace(workload, requests=requests)


def _forwarded(request: WorkloadRequest) -> WorkloadRequest:
    scheduling = structs.replace(request.arrival.scheduling, has_text_ends=False, waits_for_grammar=False)
    outputs = []
    for index, output in enumerate(request.outputs):
        num_tokens, reason = answer_of(request, index)
        outputs.append(
            SequenceOutput(worker_end=num_tokens, num_tokens=num_tokens, reason=reason, blocks=output.blocks)
        )
    return structs.replace(
        request, arrival=structs.replace(request.arrival, scheduling=scheduling), outputs=outputs, grammar_s=0
    )


def _no_client(spec: BackendSpec) -> Backend:
    raise AssertionError(f"{spec.url} is simulated")
