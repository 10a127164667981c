"""Log-probabilities in the shapes of the replies."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from eventlm.control.request import EngineRequest
from eventlm.server.detokenizer import Detokenizer
from eventlm.server.generation import ChoiceOutput
from eventlm.server.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from eventlm.server.tokenizer import Tokenizer

#: Stands for minus infinity, which JSON cannot say. vLLM's value.
SMALLEST_LOGPROB = -9999.0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself, special ones by their names; U+FFFD for parts of characters."""
    return tokenizer.raw_token_bytes(token_id).decode(errors="replace")


def chat_logprobs(tokenizer: Tokenizer, output: ChoiceOutput) -> ChatLogprobs | None:
    """What a chat says of an output's tokens; None if it was not asked to."""
    found = output.logprobs
    if found is None:
        return None
    rows = zip(output.token_ids, found.logprobs, found.top_ids, found.top_logprobs, strict=True)
    return ChatLogprobs([_chat_token(tokenizer, *row) for row in rows])


def _chat_token(
    tokenizer: Tokenizer, token_id: int, logprob: float, top_ids: list[int], top_logprobs: list[float]
) -> TokenLogprob:
    top = [_top_logprob(tokenizer, *pair) for pair in zip(top_ids, top_logprobs, strict=True)]
    own = _top_logprob(tokenizer, token_id, logprob)
    return TokenLogprob(own.token, own.logprob, own.bytes, top)


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.raw_token_bytes(token_id)
    return TopLogprob(data.decode(errors="replace"), max(logprob, SMALLEST_LOGPROB), list(data))


class CompletionLogprobsMaker:
    """What completions say of their tokens, choice by choice and output by output."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.raw_token_bytes
        self._offsets: dict[int, _Offset] = {}

    def make(self, output: ChoiceOutput) -> CompletionLogprobs | None:
        """For the next output of a choice; None if it was not asked to."""
        found = output.logprobs
        if found is None:
            return None
        offset = self._offsets.setdefault(output.choice, _Offset(self._token_bytes))
        tokens = [token_text(self._tokenizer, token_id) for token_id in output.token_ids]
        logprobs = [max(logprob, SMALLEST_LOGPROB) for logprob in found.logprobs]
        top = []
        for token, logprob, ids, values in zip(tokens, logprobs, found.top_ids, found.top_logprobs, strict=True):
            by_text = {token: logprob}
            for token_id, value in zip(ids, values, strict=True):
                # Parts of characters may look alike; the most likely one stands for them.
                by_text.setdefault(token_text(self._tokenizer, token_id), max(value, SMALLEST_LOGPROB))
            top.append(by_text)
        return CompletionLogprobs(tokens, logprobs, top, [offset.advance(token_id) for token_id in output.token_ids])


class _Offset:
    """Counts the characters of one choice's text before each token."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._num_characters = 0

    def advance(self, token_id: int) -> int:
        before = self._num_characters
        self._num_characters += len(self._detokenizer.push([token_id]))
        return before


def prompt_logprobs(tokenizer: Tokenizer, request: EngineRequest, output: ChoiceOutput) -> PromptLogprobs | UnsetType:
    """A whole choice's view of its prompt; unset if it was not asked for. The first token has no entry."""
    if request.params.prompt_logprobs is None:
        return UNSET
    found = output.prompt_logprobs
    if found is None:  # a prompt of one token
        return [None]
    rows = zip(
        request.prompt_token_ids[1:], found.logprobs, found.ranks, found.top_ids, found.top_logprobs, strict=True
    )
    return [None, *(_prompt_token(tokenizer, *row) for row in rows)]


def _prompt_token(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int, top_ids: list[int], top_logprobs: list[float]
) -> dict[int, PromptLogprob]:
    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, SMALLEST_LOGPROB), rank, token_text(tokenizer, token_id))

    found = {token_id: entry(token_id, logprob, rank)}
    for place, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        found.setdefault(top_id, entry(top_id, value, place))
    return found
