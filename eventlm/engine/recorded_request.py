"""A request as its arrival and its line in the token log tell of it, for whoever runs it again."""

from __future__ import annotations

from msgspec import structs

from eventlm.bus.token_log import PromptTokens
from eventlm.engine.request import EngineRequest
from eventlm.events import Arrived


def recorded_request(arrived: Arrived, prompt: PromptTokens) -> EngineRequest:
    """The request, with the seed that was in force. Where it had a salt, it now has the recorded hash of that."""
    return EngineRequest(
        model=arrived.model,
        prompt_token_ids=prompt.token_ids,
        params=structs.replace(prompt.params, seed=int(arrived.seed)),
        kind=arrived.kind,
        skip_cache_read=arrived.skip_cache_read,
        cache_salt=prompt.cache_salt,
        adapter=arrived.adapter,
        priority=arrived.priority,
        deadline_ns=arrived.deadline_ns,
        slo_ttft_ns=arrived.slo_ttft_ns,
        slo_tpot_ns=arrived.slo_tpot_ns,
        service_class=arrived.service_class,
        session=arrived.session,
        parent=arrived.parent,
        drop_if_late=arrived.drop_if_late,
        has_text_ends=arrived.has_text_ends,
        waits_for_grammar=arrived.waits_for_grammar,
        offline=arrived.offline,
        received_ns=arrived.received_ns,
        ready_ns=arrived.ready_ns,
        front_end=arrived.front_end,
    )
