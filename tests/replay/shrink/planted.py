"""A workload of many harmless requests, and a few that starve the others together."""

from __future__ import annotations

import random

from msgspec import structs

from eventlm.events import Arrived
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams

MILLISECOND = 1_000_000


def _request(arrival_ns: int, prompt_tokens: int, num_tokens: int, **changes: object) -> WorkloadRequest:
    request = WorkloadRequest(
        arrival=Arrived(prompt_tokens=prompt_tokens, max_tokens=num_tokens, scheduling=SchedulingParams(model="")),
        arrival_ns=arrival_ns,
        outputs=[SequenceOutput(num_tokens=num_tokens, reason="length")],
    )
    return structs.replace(request, **changes)


def planted_workload(num_requests: int, *, seed: int = 0, num_long: int = 4, long_tokens: int = 6000) -> Workload:
    """Short requests 20 ms apart, some of which follow another; in the middle a few very long prompts at once."""
    draw = random.Random(seed)
    requests = []
    for index in range(num_requests):
        arrival_ns = index * 20 * MILLISECOND
        if num_requests // 2 <= index < num_requests // 2 + num_long:
            requests.append(_request(num_requests // 2 * 20 * MILLISECOND, long_tokens, 4))
            continue
        is_turn = index > 10 and draw.random() < 0.2
        parent = draw.randrange(index - 10, index) if is_turn else -1
        requests.append(_request(arrival_ns, draw.randrange(20, 200), draw.randrange(4, 20), parent=parent))
    requests.sort(key=lambda request: request.arrival_ns)
    return Workload(source="planted", requests=requests)
