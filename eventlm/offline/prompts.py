"""Prompts in all the forms in which they may be given, as token ids. A mistake is found by its place in the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Union

import msgspec

from eventlm.errors import CheckpointError, InputError
from eventlm.offline.errors import InvalidInputError
from eventlm.text.chat_messages import chat_messages
from eventlm.text.chat_template import RESERVED_NAMES, ChatTemplate, ChatTemplateError
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tokenizer import Tokenizer


class TextPrompt(TypedDict, total=False):
    """A prompt as text. Prompts of another `cache_salt` share no cached blocks with it."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt`, if given, is only repeated in the output."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


PromptType = Union[str, list[int], TextPrompt, TokensPrompt]  # noqa: UP007
#: `{"role": ..., "content": ...}`
Message = Mapping[str, Any]

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


class Prompt(NamedTuple):
    """A prompt ready for the engine; `place` is what errors call it."""

    place: str
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


class ChatOptions(NamedTuple):
    """How conversations become prompts: see `LLM.chat`."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]


def parse_prompts(given: object, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """One prompt or a sequence of prompts: texts, lists of token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`.

    Raises InvalidInputError.
    """
    if isinstance(given, str | Mapping) or _is_token_ids(given):
        return [_parse(given, "the prompt", tokenizer, vocab_size)]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InvalidInputError(f"prompts must be a text, token ids, a dict or a list of these, got {_kind(given)}")
    return [_parse(each, f"prompts[{place}]", tokenizer, vocab_size) for place, each in enumerate(given)]


def _parse(given: object, place: str, tokenizer: Tokenizer, vocab_size: int) -> Prompt:
    if isinstance(given, Mapping):
        return _parse_dict(given, place, tokenizer, vocab_size)
    if isinstance(given, str):
        return _encoded(given, place, tokenizer, vocab_size)
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InvalidInputError(f"{place} must be a text, a list of token ids or a dict, got {_kind(given)}")
    return Prompt(place, None, _checked_ids(given, place, vocab_size))


def _parse_dict(given: Mapping[Any, Any], place: str, tokenizer: Tokenizer, vocab_size: int) -> Prompt:
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        raise InvalidInputError(f"{place} has the key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    text, token_ids, cache_salt = (given.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
    for key, value in (("prompt", text), ("cache_salt", cache_salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidInputError(f"{place}: {key!r} must be a text, got {_kind(value)}")
    if token_ids is not None:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            raise InvalidInputError(f"{place}: 'prompt_token_ids' must be a list of token ids, got {_kind(token_ids)}")
        return Prompt(place, text, _checked_ids(token_ids, place, vocab_size), cache_salt or "")
    if text is None:
        raise InvalidInputError(f"{place} has neither 'prompt' nor 'prompt_token_ids'")
    return _encoded(text, place, tokenizer, vocab_size)._replace(cache_salt=cache_salt or "")


def _encoded(
    text: str, place: str, tokenizer: Tokenizer, vocab_size: int, *, add_special_tokens: bool = True
) -> Prompt:
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{place} is not valid text: it has a lone surrogate at {error.start}") from error
    if not token_ids:
        raise InvalidInputError(f"{place} is empty")
    largest = max(token_ids)
    if largest >= vocab_size:
        token = tokenizer.token_strings([largest])[0]
        raise InvalidInputError(
            f"{place}: the id of its token {token!r} is {largest}, but the model's are from 0 to {vocab_size - 1}; "
            "this tokenizer is not made for it"
        )
    return Prompt(place, text, token_ids)


def _checked_ids(token_ids: Sequence[Any], place: str, vocab_size: int) -> list[int]:
    if not token_ids:
        raise InvalidInputError(f"{place} is empty")
    for number, token_id in enumerate(token_ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidInputError(f"{place}: token id {number} must be an integer, got {_kind(token_id)}")
        if not 0 <= token_id < vocab_size:
            raise InvalidInputError(f"{place}: token id {number} is {token_id}, but ids are from 0 to {vocab_size - 1}")
    return list(token_ids)


def _is_token_ids(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, bytes) and bool(given) and isinstance(given[0], int)


def _kind(value: object) -> str:
    return type(value).__name__


def render_conversations(given: object, tokenizer: Tokenizer, vocab_size: int, options: ChatOptions) -> list[Prompt]:
    """One conversation (a list of messages) or a list of them through the chat template. Raises InvalidInputError."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInputError(f"messages must be a list of messages or of conversations, got {_kind(given)}")
    if options.add_generation_prompt and options.continue_final_message:
        raise InvalidInputError("continue_final_message goes with add_generation_prompt=False only")
    template = _template(tokenizer, options)
    if given and isinstance(given[0], Mapping):
        return [_render(given, "the conversation", template, tokenizer, vocab_size, options)]
    return [
        _render(each, f"conversation {place}", template, tokenizer, vocab_size, options)
        for place, each in enumerate(given)
    ]


def _template(tokenizer: Tokenizer, options: ChatOptions) -> ChatTemplate:
    if not isinstance(options.variables, Mapping):
        raise InvalidInputError(f"chat_template_kwargs must be a dict, got {_kind(options.variables)}")
    if not isinstance(options.chat_template, str | None):
        raise InvalidInputError(f"chat_template must be a text, got {_kind(options.chat_template)}")
    for name in options.variables:
        if name in RESERVED_NAMES:
            raise InvalidInputError(f"chat_template_kwargs: {name!r} is set by LLM.chat itself")
    if options.chat_template is not None:
        try:
            return ChatTemplate(options.chat_template, tokenizer.special_tokens)
        except CheckpointError as error:
            raise InvalidInputError(f"chat_template: {error}") from error
    if tokenizer.chat_template is None:
        raise InvalidInputError("this model has no chat template; give chat_template=..., or use generate")
    return tokenizer.chat_template


def _render(
    given: object, place: str, template: ChatTemplate, tokenizer: Tokenizer, vocab_size: int, options: ChatOptions
) -> Prompt:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInputError(f"{place} must be a list of messages, got {_kind(given)}")
    try:
        request = msgspec.convert({"model": "", "messages": list(given)}, ChatCompletionRequest)
        text = template.render(
            chat_messages(request, knows_developer=template.knows_developer),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=dict(options.variables),
        )
    except (InputError, ChatTemplateError, msgspec.ValidationError) as error:
        raise InvalidInputError(f"{place}: {error}") from error
    # The template writes the special tokens itself.
    return _encoded(text, place, tokenizer, vocab_size, add_special_tokens=False)
