"""Restores a request from its arrival and its line in the token log."""

from __future__ import annotations

from msgspec import structs

from eventlm.bus.token_log import PromptTokens
from eventlm.engine.request import Request
from eventlm.events import Arrived


def recorded_request(arrived: Arrived, prompt: PromptTokens) -> Request:
    """The request, with the seed that was in force, and the recorded hash of its salt. Raises ValueError for a seed of
    more than 64 bits.
    """
    seed = int(arrived.seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"the seed {seed} has more than 64 bits")
    return Request(
        prompt_token_ids=prompt.token_ids,
        sampling=structs.replace(prompt.params, seed=seed),
        scheduling=arrived.scheduling,
        cache_salt=prompt.cache_salt,
    )
