"""Prompts in all the forms in which they may be given, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeGuard, Union

from eventlm.errors import CheckpointError, InputError, InvalidTypeError
from eventlm.text.chat.messages import render_chat
from eventlm.text.chat_template import ChatTemplate
from eventlm.text.decoding import convert_request
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.request_builder import check_token_ids
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
    """A prompt ready for the engine; `param` is what errors call it."""

    param: str
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


def parse_prompts(given: object, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """One prompt or a sequence of prompts: texts, lists of token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`.

    Raises InputError.
    """
    if isinstance(given, str | Mapping) or (_is_list(given) and given and isinstance(given[0], int)):
        return [_parse(given, "prompt", tokenizer, vocab_size)]
    if not _is_list(given):
        raise _wrong_type("prompts", "a text, token ids, a dict or a list of these", given)
    return [_parse(each, f"prompts[{index}]", tokenizer, vocab_size) for index, each in enumerate(given)]


def _parse(given: object, param: str, tokenizer: Tokenizer, vocab_size: int) -> Prompt:
    if isinstance(given, str):
        return _encoded(given, param, tokenizer, vocab_size)
    if not isinstance(given, Mapping):
        return Prompt(param, None, _token_ids(given, param, "a text, a list of token ids or a dict", vocab_size))
    if unknown := [key for key in given if key not in _KEYS]:
        raise InputError(param, f"{param} has the key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    text, token_ids, cache_salt = (given.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
    for key, value in (("prompt", text), ("cache_salt", cache_salt)):
        if not isinstance(value, str | None):
            raise _wrong_type(f"{param}.{key}", "a text", value)
    if token_ids is not None:
        ids = _token_ids(token_ids, f"{param}.prompt_token_ids", "a list of token ids", vocab_size)
        return Prompt(param, text, ids, cache_salt or "")
    if text is None:
        raise InputError(param, f"{param} has neither 'prompt' nor 'prompt_token_ids'")
    return _encoded(text, param, tokenizer, vocab_size)._replace(cache_salt=cache_salt or "")


def _encoded(
    text: str, param: str, tokenizer: Tokenizer, vocab_size: int, *, add_special_tokens: bool = True
) -> Prompt:
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError as error:
        raise InputError(param, f"{param} is not valid text: it has a lone surrogate at {error.start}") from error
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        token = tokenizer.token_strings([largest])[0]
        raise InputError(
            param,
            f"{param}: the id of its token {token!r} is {largest}, but the model's are from 0 to {vocab_size - 1}; "
            "this tokenizer is not made for it",
        )
    return Prompt(param, text, token_ids)


def _token_ids(given: object, param: str, expected: str, vocab_size: int) -> list[int]:
    if not _is_list(given):
        raise _wrong_type(param, expected, given)
    check_token_ids(given, vocab_size, param)
    return list(given)


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def _wrong_type(param: str, expected: str, given: object) -> InvalidTypeError:
    return InvalidTypeError(param, f"{param} must be {expected}, got {type(given).__name__}")


def render_conversations(
    given: object, tokenizer: Tokenizer, vocab_size: int, chat_template: object = None, **options: object
) -> list[Prompt]:
    """One conversation (a list of messages) or a list of them through the chat template.

    `chat_template` stands in for the model's own; `options` are fields of ChatCompletionRequest. Raises InputError.
    """
    if not _is_list(given):
        raise _wrong_type("messages", "a list of messages or of conversations", given)
    template = _template(chat_template, tokenizer)
    is_single = bool(given) and isinstance(given[0], Mapping)
    prompts = []
    for index, messages in enumerate([given] if is_single else given):
        param = "messages" if is_single else f"messages[{index}]"
        if not _is_list(messages):
            raise _wrong_type(param, "a list of messages", messages)
        raw = {"model": "", "messages": list(messages), **options}
        try:
            text = render_chat(convert_request(raw, ChatCompletionRequest, {}), template)
        except InputError as error:
            raise error if is_single else InputError(param, f"{param}: {error}") from error
        # The template writes the special tokens itself.
        prompts.append(_encoded(text, param, tokenizer, vocab_size, add_special_tokens=False))
    return prompts


def _template(given: object, tokenizer: Tokenizer) -> ChatTemplate:
    if not isinstance(given, str | None):
        raise _wrong_type("chat_template", "a text", given)
    if given is not None:
        try:
            return ChatTemplate(given, tokenizer.special_tokens)
        except CheckpointError as error:
            raise InputError("chat_template", f"chat_template: {error}") from error
    if tokenizer.chat_template is None:
        raise InputError("messages", "this model has no chat template; give chat_template=..., or use generate")
    return tokenizer.chat_template
