"""How the tokens of one request are chosen and when they end. Travels to the worker beside the launch event."""

from __future__ import annotations

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 keep the whole vocabulary. `seed` is an unsigned 64-bit
    integer; the engine draws and records one when the request brought none. `stop` strings are found where text is
    made, never by the worker; `eos_token_ids` and `stop_token_ids` by the worker (the former unless `ignore_eos`).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
