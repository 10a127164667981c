"""The body of `POST /completion`, and the requests that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, structs

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.sampling_params import (
    LARGEST_LOGIT_BIAS,
    MinP,
    Penalty,
    TokenId,
)
from eventlm.server.context import ServerContext
from eventlm.server.translation import (
    SMALLEST_TOP_P,
    StopText,
    bounded_repetition_penalty,
    bounded_temperature,
    limited,
    native_fields,
    stop_strings,
)
from eventlm.text.decoding import MAX_LOGIT_BIASES, too_many_biases
from eventlm.text.protocol import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, CompletionRequest, RequestFields, Seed

#: llama.cpp's value for a seed that is drawn.
RANDOM_SEED = 2**32 - 1
#: Names of samplers. Those that this server does not have are accepted, since their own parameters must be neutral.
SAMPLERS = ("temperature", "top_k", "top_p", "min_p", "penalties")
_OTHER_SAMPLERS = ("dry", "typ_p", "typical_p", "xtc", "top_n_sigma", "adaptive_p")

#: Fields without support, each with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "dynatemp_range": (0,),
    "typical_p": (1,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "adaptive_target": (-1,),
    "min_keep": (0, 1),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "post_sampling_probs": (False,),
    "lora": ([],),
}
#: Fields that change nothing, each with the reason.
IGNORED_BY_LLAMACPP = {
    "id_slot": "there are no slots to choose from",
    "n_keep": "texts end with the context; nothing is shifted out of it",
    "n_discard": "texts end with the context; nothing is shifted out of it",
    "n_cache_reuse": "prefixes are shared block by block",
    "return_progress": "no progress is reported before the first token",
    "timings_per_token": "timings are told at the end",
    "sse_ping_interval": "no pings are sent",
}
#: Names of fields in errors, where llama.cpp has others.
_NATIVE_NAMES = {
    "guided_json": "json_schema",
    "guided_grammar": "grammar",
    "repetition_penalty": "repeat_penalty",
    "n": "n_cmpl",
    "max_tokens": "n_predict",
}

_Part = str | TokenId


class PromptObject(Struct, kw_only=True):
    """A prompt as an object. `multimodal_data` is not supported."""

    prompt_string: str
    multimodal_data: list[str] | None = None


class LlamaSampling(RequestFields, kw_only=True):
    """How llama.cpp's clients choose tokens. What is left out is the model's default.

    What llama.cpp has no bounds for is cut to those of this server, or has its neutral value.

    n_predict, max_tokens: two names of the most tokens, -1: as many as the context holds, 0: none. temperature: 0 and
    below is greedy. samplers: those in use, in this server's own order. repeat_last_n: 0 turns the three penalties off;
    otherwise they see the whole text.
    """

    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: Annotated[int, Meta(le=2**31 - 1)] | None = None
    top_p: float | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    #: Pairs of a token or a text and its bias; false: never.
    logit_bias: list[tuple[_Part, float | bool]] | dict[str, float | bool] | None = None
    samplers: list[str] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    n_probs: Annotated[int, Meta(ge=0)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most output tokens, 0 included; None: as many as the context holds."""
        asked = self.max_tokens if self.n_predict is None else self.n_predict
        return None if asked is None or asked < 0 else asked

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, without empty ones."""
        return stop_strings(self.stop)

    def fields(self) -> dict[str, Any]:
        """The fields of a request to the model, except for biases and the number of tokens."""
        fields: dict[str, Any] = {
            "temperature": bounded_temperature(self.temperature),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "top_p": None if self.top_p is None else min(max(self.top_p, SMALLEST_TOP_P), 1.0),
            "min_p": self.min_p,
            "seed": None if self.seed in (None, RANDOM_SEED) else self.seed,
            "stop": self.stop_strings,
            "repetition_penalty": bounded_repetition_penalty(self.repeat_penalty),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "ignore_eos": self.ignore_eos,
            "guided_grammar": self.grammar or None,
            "guided_json": self.json_schema,
            "logprobs": min(self.n_probs, MAX_LOGPROBS) if self.n_probs else None,
        }
        names = self.samplers
        if self.repeat_last_n == 0 or (names is not None and "penalties" not in names):
            fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if names is not None:
            _check_samplers(names)
            neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            fields |= {name: value for name, value in neutral.items() if name not in names}
        return fields


class LlamaCompletionRequest(LlamaSampling, kw_only=True):
    """Body of `POST /completion`.

    prompt: a text, tokens, a mixture of both, an object, or a list of prompts, which are strings, lists or objects.
    response_fields: the only fields of the reply; `a/b` is the field `b` within `a`. cache_prompt: false computes the
    whole prompt.
    """

    prompt: str | PromptObject | list[_Part | list[_Part] | PromptObject]
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None

    @property
    def wants_timings(self) -> bool:
        """False, since replies are lists, too: each of them has its own."""
        return False


class _Biases(NamedTuple):
    """By token id, and those that must never come."""

    by_token: dict[str, float]
    banned: tuple[int, ...]


async def completion_requests(
    context: ServerContext, body: LlamaCompletionRequest, received_ns: int, scheduling: Mapping[str, Any]
) -> list[Request]:
    """A request for each prompt. Raises InputError."""
    prompts = await encode_prompts(context, body.prompt)
    biases = await _biases(context, body.logit_bias)
    if context.forwards:
        biases.by_token.update({str(token_id): -LARGEST_LOGIT_BIAS for token_id in biases.banned})
        biases = biases._replace(banned=())
    most = body.most_tokens
    with native_fields(_NATIVE_NAMES):
        completion = CompletionRequest(
            model=body.model,
            prompt=[*prompts],
            n=body.n_cmpl,
            logit_bias=biases.by_token or None,
            # A prompt that is only read is one that is shown, without tokens after it.
            max_tokens=0 if most == 0 else None,
            echo=most == 0 or None,
            **body.fields(),
        )
        skips_cache = {"skip_cache_read": True} if body.cache_prompt is False else {}
        group, _ = await context.requests.completions(completion, received_ns, **scheduling, **skips_cache)
    banned = tuple((token_id,) for token_id in biases.banned)
    return [_without(limited(request, most or None), banned) for request in group]


async def encode_prompts(context: ServerContext, prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """The tokens of each prompt. If it begins with a text, the tokenizer's special tokens are added to that. A backend
    gets a text as it is.

    Raises InputError.
    """
    is_list = isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)
    if not is_list:
        return [await _encode(context, prompt, param)]
    if not prompt:
        raise InputError(param, f"Invalid value for '{param}': it is empty.")
    return [await _encode(context, each, f"{param}[{index}]") for index, each in enumerate(prompt)]


async def _encode(context: ServerContext, prompt: Any, param: str) -> str | list[int]:
    if isinstance(prompt, PromptObject):
        if prompt.multimodal_data:
            name = f"{param}.multimodal_data"
            raise InputError(name, f"'{name}' is not supported: models here take text only; leave it out.")
        prompt = prompt.prompt_string
    if context.forwards and isinstance(prompt, str):
        return prompt
    found: list[int] = []
    for index, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        if isinstance(part, str):
            context.check_knows_tokens()
            found += await context.requests.encoder.encode(part, add_special_tokens=index == 0)
        elif isinstance(part, int):
            found.append(_checked(context, part, f"{param}[{index}]"))
        else:
            path = f"{param}[{index}]"
            raise InputError(path, f"Invalid value for '{path}': within a prompt there are texts and tokens only.")
    return found


def _checked(context: ServerContext, token_id: int, param: str) -> int:
    """A token id. Raises InputError unless it is one of the model's."""
    if not 0 <= token_id < context.vocab_size:
        raise InputError(param, f"Invalid value for '{param}': token ids are from 0 to {context.vocab_size - 1}.")
    return token_id


async def _biases(context: ServerContext, given: Any) -> _Biases:
    """The biases of single tokens; a text stands for each of its tokens. Raises InputError."""
    by_token: dict[str, float] = {}
    banned: dict[int, None] = {}
    pairs: Sequence[tuple[str | int, float | bool]] = list(given.items()) if isinstance(given, dict) else given or []
    if len(pairs) > MAX_LOGIT_BIASES:
        raise too_many_biases()
    for token, bias in pairs:
        if bias is True:
            raise InputError("logit_bias", "Invalid value for 'logit_bias': a bias is a number or false.")
        is_id = isinstance(token, int) or (isinstance(given, dict) and token.isdecimal() and token.isascii())
        token_ids = [_checked(context, int(token), "logit_bias")] if is_id else await _encode_plain(context, str(token))
        for token_id in token_ids:
            if bias is False:
                banned[token_id] = None
            else:
                by_token[str(token_id)] = min(max(bias, -LARGEST_LOGIT_BIAS), LARGEST_LOGIT_BIAS)
        # A text stands for any number of tokens.
        if len(by_token) > MAX_LOGIT_BIASES:
            raise too_many_biases()
        if len(banned) > MAX_BAD_WORDS:
            raise InputError(
                "logit_bias",
                f"Invalid value for 'logit_bias': at most {MAX_BAD_WORDS} tokens can be banned; use a bias of "
                f"{-LARGEST_LOGIT_BIAS:g} for others.",
            )
    return _Biases(by_token, tuple(banned))


async def _encode_plain(context: ServerContext, text: str) -> list[int]:
    context.check_knows_tokens()
    return await context.requests.encoder.encode(text, add_special_tokens=False)


def _without(request: Request, banned: tuple[tuple[int, ...], ...]) -> Request:
    """The request with more sequences of tokens that must not come."""
    if not banned:
        return request
    found = (*request.sampling.bad_words_token_ids, *banned)
    return structs.replace(request, sampling=structs.replace(request.sampling, bad_words_token_ids=found))


def _check_samplers(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in (*SAMPLERS, *_OTHER_SAMPLERS):
            param = f"samplers[{index}]"
            known = ", ".join(map(repr, SAMPLERS))
            raise InputError(param, f"Invalid value for '{param}': this server has {known}.")
