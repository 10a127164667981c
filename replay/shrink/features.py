"""What a request can do without: each feature is a request without it, the same if it has it not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from eventlm.replay.workload.workload import NEVER, SequenceOutput, WorkloadRequest

Simplify = Callable[[WorkloadRequest], WorkloadRequest]


def _scheduling(request: WorkloadRequest, **changes: Any) -> WorkloadRequest:
    scheduling = structs.replace(request.arrival.scheduling, **changes)
    return structs.replace(request, arrival=structs.replace(request.arrival, scheduling=scheduling))


def _without_group(request: WorkloadRequest) -> WorkloadRequest:
    return structs.replace(request, arrival=structs.replace(request.arrival, group_size=1, group_index=0))


def _one_sample(request: WorkloadRequest) -> WorkloadRequest:
    cancel = request.cancel
    if cancel is not None and cancel.index:
        cancel = structs.replace(cancel, index=0)
    arrival = structs.replace(request.arrival, n=1)
    return structs.replace(request, arrival=arrival, outputs=request.outputs[:1], cancel=cancel)


def _without_text_ends(request: WorkloadRequest) -> WorkloadRequest:
    outputs = [structs.replace(output, text_end=None, answer_delay_ns=None, answer_s=0) for output in request.outputs]
    return structs.replace(_scheduling(request, has_text_ends=False), outputs=outputs)


def _plain_outputs(request: WorkloadRequest) -> WorkloadRequest:
    """Outputs that their limit ends, as long as they are now."""
    if request.arrival.scheduling.kind != "generate" or request.arrival.scheduling.has_text_ends:
        return request
    most = request.arrival.max_tokens
    num_tokens = max(min(max(output.worker_end for output in request.outputs), most), 1)
    plain = SequenceOutput(num_tokens=num_tokens, reason="length")
    arrival = structs.replace(request.arrival, max_tokens=num_tokens)
    return structs.replace(request, arrival=arrival, outputs=[plain] * arrival.n)


def _without_record(request: WorkloadRequest) -> WorkloadRequest:
    """Without what only the recorded run knew: its positions break ties between facts of one time."""
    request = _scheduling(request, received_ns=0, ready_ns=0)
    arrival = structs.replace(request.arrival, seed="0", s=0, ts=0, c=0, p=0)
    changes: dict[str, Any] = {
        name: structs.replace(found, s=0)
        for name in ("cancel", "patience")
        if (found := getattr(request, name)) is not None
    }
    outputs = [
        structs.replace(
            output,
            answer_s=0,
            text_end=None if output.text_end is None else structs.replace(output.text_end, s=0),
        )
        for output in request.outputs
    ]
    return structs.replace(
        request, arrival=arrival, outputs=outputs, received_before_ns=0, ready_before_ns=0, waited_ns=0,
        is_unfinished=False, grammar_s=0, s=0, **changes,
    )  # fmt: skip


def _without_blocks(request: WorkloadRequest) -> WorkloadRequest:
    outputs = [structs.replace(output, blocks=[]) for output in request.outputs]
    return structs.replace(request, arrival=structs.replace(request.arrival, blocks=[]), outputs=outputs)


#: By name, in the order in which they are tried.
FEATURES: dict[str, Simplify] = {
    "positions in the recorded run": _without_record,
    "cancels": lambda request: structs.replace(request, cancel=None),
    "patience": lambda request: structs.replace(request, patience=None),
    "text ends": _without_text_ends,
    "grammars": lambda request: structs.replace(
        _scheduling(request, waits_for_grammar=False), grammar_delay_ns=0, grammar_error="", grammar_s=0
    ),
    "samples": _one_sample,
    "ends by the model": _plain_outputs,
    "shared prefixes": _without_blocks,
    "deadlines": lambda request: _scheduling(request, deadline_ns=0, drop_if_late=False),
    "objectives": lambda request: _scheduling(request, slo_ttft_ns=0, slo_tpot_ns=0),
    "priorities": lambda request: _scheduling(request, priority=0),
    "service classes": lambda request: _scheduling(request, service_class=""),
    "sessions": lambda request: _scheduling(request, session=0),
    "turns": lambda request: structs.replace(request, parent=-1, think_ns=None),
    "pauses for thought": lambda request: structs.replace(request, think_ns=None),
    "searches": lambda request: _scheduling(request, parent=0, offline=False),
    "adapters": lambda request: _scheduling(request, adapter="", skip_cache_read=False, front_end=0),
    "groups": _without_group,
}


def with_prompt(request: WorkloadRequest, num_tokens: int, *, block_size: int) -> WorkloadRequest:
    """With a shorter prompt, which begins with the same blocks."""
    blocks = request.arrival.blocks[: -(-num_tokens // block_size)] if block_size else []
    return structs.replace(request, arrival=structs.replace(request.arrival, prompt_tokens=num_tokens, blocks=blocks))


def output_tokens(request: WorkloadRequest) -> int:
    """The longest that any of its outputs can become; 0 for scores and embeddings."""
    return min(max(output.worker_end for output in request.outputs), request.arrival.max_tokens)


def with_output(request: WorkloadRequest, num_tokens: int) -> WorkloadRequest:
    """With no output longer than this. A limit that was reached stays the reason of the end."""
    outputs = [
        structs.replace(output, worker_end=min(output.worker_end, num_tokens), num_tokens=num_tokens)
        if output.worker_end < NEVER
        else structs.replace(output, num_tokens=min(output.num_tokens, num_tokens))
        for output in request.outputs
    ]
    is_limited = all(output.worker_end == NEVER for output in request.outputs)
    most = num_tokens if is_limited else request.arrival.max_tokens
    return structs.replace(request, arrival=structs.replace(request.arrival, max_tokens=most), outputs=outputs)
