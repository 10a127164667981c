"""How the tokens of one request are chosen and when they end. Travels to the worker beside the launch event."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

#: How a prompt becomes one vector: its last token's hidden state, or the mean of all of them.
Pooling = Literal["last", "mean"]

#: Below it division by the temperature overflows; such requests want the most likely token.
SMALLEST_TEMPERATURE = 1e-5
#: Any positive number by its meaning; bounded so that no logit overflows.
SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 0.001, 1000.0
#: OpenAI's bounds of presence and frequency penalty, either way.
LARGEST_PENALTY = 2.0
#: Beyond it a bias means "never" and "always" already. OpenAI's bound.
LARGEST_LOGIT_BIAS = 100.0


class SamplerParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request, as the worker needs it: numbers and token ids, no text.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 keep the whole vocabulary. `repetition_penalty`
    divides or multiplies the logits of tokens in the prompt or the output (Keskar et al., 2019), `presence_penalty`
    and `frequency_penalty` are subtracted from those of the output (OpenAI's definition). `logit_bias` has (token,
    what is added to its logit). `allowed_token_ids`, if not empty, are the only ones that can be drawn; the last token
    of a sequence in `bad_words` cannot be drawn behind its others in the output. Before `min_tokens` output tokens
    neither an end token nor a stop token is drawn. `seed` is an unsigned 64-bit integer; the engine draws and records
    one when the request brought none. `eos_token_ids` (unless `ignore_eos`) and `stop_token_ids` end the output.
    `grammar` (llguidance's: Lark, or JSON that wraps one) is what the output must match; empty: anything.

    `logprobs` and `prompt_logprobs` ask for the log-probability of each output or prompt token, and for those of so
    many of the most likely ones beside it; None: not at all. They are the model's own: of the logits before anything
    above changes them.

    `pooling` is of requests of the kind `pool`, which are not sampled. A mean needs every hidden state of the prompt:
    such a request must skip cache reads.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling = "last"


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of consecutive tokens, one entry of each list a token.

    logprobs: the token's own. ranks: its place among all by likelihood, from 1. top_ids, top_logprobs: the most
    likely tokens, best first, as many as were asked for.
    """

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
