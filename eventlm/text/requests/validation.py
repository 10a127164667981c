"""From a decoded request to what the engine takes: checks that need more than a field's type, and defaults."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from msgspec import structs

from eventlm.engine.request import Request
from eventlm.errors import InputError, InvalidTypeError, PromptTooLongError, UnknownModelError
from eventlm.sampling_params import LARGEST_LOGIT_BIAS, SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.text.protocol import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_GROUP_SEQUENCES,
    MAX_LOGIT_BIASES,
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    SAMPLING_FIELDS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from eventlm.text.sampling import check_known_tokens, check_token_ids, resolved

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class Limits(NamedTuple):
    """What the model allows: names, context in tokens, and the ids that exist."""

    model_names: list[str]
    max_model_len: int
    vocab_size: int


def check_request(request: GenerationRequest, limits: Limits) -> None:
    """Raise InputError for what is wrong with the fields that both endpoints have."""
    if request.model not in limits.model_names:
        raise UnknownModelError(request.model)
    if request.stream_options is not None and not request.stream:
        raise InputError("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    _check_metadata(request.metadata or {})
    if isinstance(request, CompletionRequest):
        _check_completion(request)
    _check_stops(request)
    _check_logprobs(request)
    _check_bad_words(request.bad_words or [])


def _check_metadata(metadata: dict[str, str]) -> None:
    """OpenAI's bounds. What is in it stays out of messages, too."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise InputError(
            "metadata", f"Invalid value for 'metadata': at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}."
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise InputError(
                "metadata",
                f"Invalid value for 'metadata': keys have at most {MAX_METADATA_KEY_CHARACTERS} characters, values "
                f"{MAX_METADATA_VALUE_CHARACTERS}.",
            )


def _check_completion(request: CompletionRequest) -> None:
    if not request.generates and not request.echo:
        raise InputError("max_tokens", "Invalid value for 'max_tokens': 0 is only allowed when 'echo' is true.")
    if request.best_of not in (None, request.n or 1):
        raise InputError("best_of", "'best_of' is not supported yet; leave it out or set it to the same value as 'n'.")


def _check_logprobs(request: GenerationRequest) -> None:
    if isinstance(request, ChatCompletionRequest) and request.top_logprobs and not request.logprobs:
        raise InputError("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    if request.prompt_logprobs is not None and request.stream:
        raise InputError("prompt_logprobs", "'prompt_logprobs' is not available when 'stream' is true.")


def _check_bad_words(words: list[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InputError(
            "bad_words", f"Invalid value for 'bad_words': at most {MAX_BAD_WORDS} strings, got {len(words)}."
        )
    for place, word in enumerate(words):
        if not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
            param = f"bad_words[{place}]"
            raise InputError(
                param, f"Invalid value for '{param}': a bad word has 1 to {MAX_BAD_WORD_CHARACTERS} characters."
            )


def _logit_bias(request: GenerationRequest) -> dict[int, float]:
    """By token id, in the order of the body. Raises InputError."""
    biases = request.logit_bias or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise InputError(
            "logit_bias", f"Invalid value for 'logit_bias': at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}."
        )
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InputError("logit_bias", "Invalid value for 'logit_bias': its keys are token ids in digits.")
        if not -LARGEST_LOGIT_BIAS <= bias <= LARGEST_LOGIT_BIAS:
            raise InputError(f"logit_bias.{key}", f"Invalid value for 'logit_bias.{key}': a bias is from -100 to 100.")
    return {int(key): bias for key, bias in biases.items()}


def _check_stops(request: GenerationRequest) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise InputError("stop", f"Invalid value for 'stop': at most {MAX_STOP_STRINGS} strings, got {len(stops)}.")
    for place, stop in enumerate(stops):
        param = "stop" if isinstance(request.stop, str) else f"stop[{place}]"
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise InputError(
                param,
                f"Invalid value for '{param}': a stop string has 1 to {MAX_STOP_CHARACTERS} characters.",
            )


def completion_prompts(request: CompletionRequest, vocab_size: int) -> list[str | list[int]]:
    """The prompts of the body, each a text or token ids. Raises InputError for empty and mixed ones."""
    prompts = read_prompts(request.prompt, vocab_size, "prompt")
    if len(prompts) * (request.n or 1) > MAX_GROUP_SEQUENCES:
        raise InputError("prompt", f"Invalid value for 'prompt': prompts times n is at most {MAX_GROUP_SEQUENCES}.")
    return prompts


def read_prompts(prompt: str | list[Any], vocab_size: int, field: str) -> list[str | list[int]]:
    """What a text, token ids or a list of either in `field` has. Raises InputError for empty and mixed ones."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [_all_of(prompt, int, "integers", field)]
    elif prompt and isinstance(prompt[0], list):
        prompts = _all_of(prompt, list, "lists of integers", field)
    else:
        prompts = _all_of(prompt, str, "strings", field)
    if not prompts:
        raise InputError(field, f"Invalid value for '{field}': it is empty.")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    for place, each in enumerate(prompts):
        param = field if one else f"{field}[{place}]"
        if not each:
            raise InputError(param, f"Invalid value for '{param}': it is empty.")
        if not isinstance(each, str):
            check_token_ids(each, vocab_size, param)
    return prompts


def _all_of(items: list[Any], kind: type, plural: str, field: str) -> list[Any]:
    if set(map(type, items)) <= {kind}:
        return items
    for place, item in enumerate(items):
        if not isinstance(item, kind):
            raise InvalidTypeError(f"{field}[{place}]", f"Invalid type for '{field}[{place}]': expected only {plural}.")
    return items


def truncate_prompt(request: GenerationRequest, token_ids: list[int], limits: Limits) -> list[int]:
    """The prompt's last tokens, as many as the request wants to keep. Raises InputError if that is none."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    if num_kept == 0:
        raise InputError(
            "truncate_prompt_tokens",
            "Invalid value for 'truncate_prompt_tokens': it is the number of prompt tokens to keep, or -1.",
        )
    if num_kept == -1:
        most_tokens = 1 if request.most_tokens is None else request.most_tokens
        num_kept = max(limits.max_model_len - most_tokens, 1)
    return token_ids[-num_kept:]


def sampling_params(request: GenerationRequest, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    """The body's sampling parameters over the model's defaults. Raises InputError."""
    given = {field.name: value for field in SAMPLING_FIELDS if (value := getattr(request, field.name)) is not None}
    given |= {
        # Decided for each prompt, by `engine_request`; 0 stands for a prompt that is only scored.
        "max_tokens": request.most_tokens or None,
        "logprobs": request.num_logprobs,
        "prompt_logprobs": request.num_prompt_logprobs,
        "logit_bias": _logit_bias(request) or None,
        "stop": request.stop if request.generates else [],
        # Structure that other fields ask for is a grammar as well.
        "structured_outputs": None,
    }
    params = structs.replace(defaults, **given)
    check_known_tokens(params, vocab_size)
    return params


def engine_request(
    request: GenerationRequest,
    params: SamplingParams,
    prompt_token_ids: list[int],
    *,
    limits: Limits,
    prompt_param: str,
    received_ns: int,
    ready_ns: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> Request:
    """One prompt of the body for the engine, `bad_words` as token ids. Raises InputError if it exceeds the context.

    How it is scheduled is not in it yet, see `eventlm.server.scheduling`.
    """
    grammar = grammar if request.generates else ""
    max_tokens = _max_tokens(request, len(prompt_token_ids), limits, prompt_param)
    return Request(
        prompt_token_ids=prompt_token_ids,
        sampling=resolved(
            params,
            vocab_size=limits.vocab_size,
            bad_words_token_ids=bad_words,
            grammar=grammar,
            max_tokens=max_tokens or None,
        ),
        cache_salt=request.cache_salt or "",
        scheduling=SchedulingParams(
            model=request.model,
            kind="generate" if request.generates else "score",
            # Only what is computed has log-probabilities.
            skip_cache_read=params.prompt_logprobs is not None or not request.generates,
            has_text_ends=bool(params.stop),
            waits_for_grammar=bool(grammar),
            received_ns=received_ns,
            ready_ns=ready_ns,
        ),
    )


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, limits: Limits, prompt_param: str) -> int:
    context = limits.max_model_len
    if not num_prompt_tokens:
        raise InputError(prompt_param, f"Invalid value for '{prompt_param}': it is empty.")
    asked = request.most_tokens
    completion = 1 if asked is None else asked
    if num_prompt_tokens + completion > context:
        raise PromptTooLongError(
            prompt_param,
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt_tokens + completion} tokens ({num_prompt_tokens} in the {prompt_param}, {completion} in "
            f"the completion). Please reduce the length of the {prompt_param} or the completion.",
        )
    max_tokens = asked if asked is not None else context - num_prompt_tokens
    if (request.min_tokens or 0) > max_tokens:
        raise InputError(
            "min_tokens",
            f"Invalid value for 'min_tokens': {request.min_tokens} is more than max_tokens, which is {max_tokens}.",
        )
    return max_tokens
