"""`generation_settings`: how tokens are chosen, in llama.cpp's words. `/props` has them, and every reply."""

from __future__ import annotations

from msgspec import Struct

from eventlm.sampling_params import SamplingParams
from eventlm.server.llamacpp.request import RANDOM_SEED, SAMPLERS, LlamaCompletionRequest


class TokenBias(Struct, frozen=True):
    """What is added to the logit of a token; null: it never comes."""

    token: int
    bias: float | None


class GenerationSettings(Struct, frozen=True, kw_only=True):
    """What is in force. n_predict, max_tokens: -1: as many as the context holds. samplers: those in use, in this
    server's order. grammar: as it was given, or llguidance's for a JSON schema.

    From `dynatemp_range` on: what this server does not have, with the values that mean so.
    """

    n_predict: int = -1
    max_tokens: int = -1
    seed: int = RANDOM_SEED
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int = -1
    stop: list[str] = []
    logit_bias: list[TokenBias] = []
    ignore_eos: bool = False
    stream: bool = False
    n_probs: int = 0
    grammar: str = ""
    samplers: list[str]
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    n_keep: int = 0
    n_discard: int = 0


def generation_settings(params: SamplingParams, body: LlamaCompletionRequest | None = None) -> GenerationSettings:
    """Those of a request with these parameters, or the defaults of all requests."""
    most = body.most_tokens if body is not None else None
    chosen = body.samplers if body is not None else None
    return GenerationSettings(
        n_predict=-1 if most is None else most,
        max_tokens=-1 if most is None else most,
        seed=RANDOM_SEED if params.seed is None else params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repeat_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repeat_last_n=0 if body is not None and body.repeat_last_n == 0 else -1,
        stop=params.stop_strings,
        logit_bias=_biases(params),
        ignore_eos=params.ignore_eos,
        stream=body is not None and bool(body.stream),
        n_probs=params.logprobs or 0,
        grammar=(body.grammar if body is not None else None) or params.grammar,
        samplers=[name for name in SAMPLERS if chosen is None or name in chosen],
    )


def _biases(params: SamplingParams) -> list[TokenBias]:
    banned = [words[0] for words in params.bad_words_token_ids if len(words) == 1]
    ends = params.eos_token_ids if params.ignore_eos else ()
    return [
        *(TokenBias(token_id, bias) for token_id, bias in (params.logit_bias or {}).items()),
        *(TokenBias(token_id, None) for token_id in dict.fromkeys((*banned, *ends))),
    ]
