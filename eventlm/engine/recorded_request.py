"""A request as its arrival and its line in the token log tell of it, for whoever runs it again."""

from __future__ import annotations

from msgspec import structs

from eventlm.bus.token_log import PromptTokens
from eventlm.engine.request import Request
from eventlm.events import Arrived


def recorded_request(arrived: Arrived, prompt: PromptTokens) -> Request:
    """The request, with the seed that was in force. Where it had a salt, it now has the recorded hash of that."""
    return Request(
        prompt_token_ids=prompt.token_ids,
        sampling=structs.replace(prompt.params, seed=int(arrived.seed)),
        scheduling=arrived.scheduling,
        cache_salt=prompt.cache_salt,
    )
