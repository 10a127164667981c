"""Log-probabilities in the shapes of the replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import UNSET, UnsetType

from eventlm.engine.request import Request
from eventlm.sampling_params import TokenLogprobs
from eventlm.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.detokenizer import Detokenizer
from eventlm.text.echo import Echo
from eventlm.text.tokenizer import Tokenizer, token_text

#: Stands for minus infinity, which JSON cannot say. vLLM's value.
SMALLEST_LOGPROB = -9999.0


def chat_logprobs(tokenizer: Tokenizer, output: ChoiceOutput, *, as_token_ids: bool) -> ChatLogprobs | None:
    """What a chat says of an output's tokens; None if it was not asked to."""
    found = output.logprobs
    if found is None:
        return None

    def top_logprob(token_id: int, logprob: float) -> TopLogprob:
        token = token_text(tokenizer, token_id, as_token_id=as_token_ids)
        return TopLogprob(token, max(logprob, SMALLEST_LOGPROB), list(tokenizer.raw_token_bytes(token_id)))

    content = []
    rows = zip(output.token_ids, found.logprobs, found.top_ids, found.top_logprobs, strict=True)
    for token_id, logprob, top_ids, top_logprobs in rows:
        own = top_logprob(token_id, logprob)
        top = [top_logprob(*pair) for pair in zip(top_ids, top_logprobs, strict=True)]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class CompletionLogprobsMaker:
    """What completions say of their tokens, with `num_top` alternatives, choice by choice and output by output.

    `echoed_characters`: how long the text is that stands before the output of a choice.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        skip_special_tokens: bool,
        as_token_ids: bool,
        echoed_characters: Callable[[int], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.raw_token_bytes
        self._as_token_ids = as_token_ids
        self._echoed_characters = echoed_characters
        self._offsets: dict[int, _Offset] = {}

    def output(self, output: ChoiceOutput) -> CompletionLogprobs | None:
        """Of the next output tokens of a choice; None if there are none."""
        if output.logprobs is None:
            return None
        if output.choice not in self._offsets:
            self._offsets[output.choice] = _Offset(self._token_bytes, self._echoed_characters(output.choice))
        offset = self._offsets[output.choice]
        return self._make(output.token_ids, output.logprobs, [offset.advance(token) for token in output.token_ids])

    def prompt_start(self, part: Echo) -> CompletionLogprobs:
        """Of the first token of an echoed prompt."""
        return CompletionLogprobs([self._text(part.token_ids[0])], [None], [None], list(part.text_offset))

    def prompt(self, part: Echo, found: TokenLogprobs) -> CompletionLogprobs:
        """Of further tokens of an echoed prompt."""
        return self._make(part.token_ids, found, part.text_offset)

    def _make(self, token_ids: list[int], found: TokenLogprobs, text_offset: list[int]) -> CompletionLogprobs:
        tokens = [self._text(token_id) for token_id in token_ids]
        logprobs = [max(logprob, SMALLEST_LOGPROB) for logprob in found.logprobs]
        top: list[dict[str, float] | None] = []
        for token, logprob, ids, values in zip(tokens, logprobs, found.top_ids, found.top_logprobs, strict=True):
            by_text = {token: logprob}
            for token_id, value in zip(ids[: self._num_top], values[: self._num_top], strict=True):
                # Parts of characters may look alike; the most likely one stands for them.
                text = self._text(token_id)
                by_text[text] = max(value, by_text.get(text, SMALLEST_LOGPROB))
            top.append(by_text)
        return CompletionLogprobs(tokens, list(logprobs), top, list(text_offset))

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, as_token_id=self._as_token_ids)


def join_logprobs(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs | None:
    """Consecutive parts as one; None if there is nothing in them."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    return CompletionLogprobs(
        [token for part in found for token in part.tokens],
        [logprob for part in found for logprob in part.token_logprobs],
        [top for part in found for top in part.top_logprobs],
        [place for part in found for place in part.text_offset],
    )


class _Offset:
    """Counts the characters of one choice's text before each token."""

    def __init__(self, token_bytes: Callable[[int], bytes], num_characters: int) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._num_characters = num_characters

    def advance(self, token_id: int) -> int:
        before = self._num_characters
        self._num_characters += len(self._detokenizer.push([token_id]))
        return before


def prompt_logprobs(
    tokenizer: Tokenizer, request: Request, output: ChoiceOutput, num_top: int | None
) -> PromptLogprobs | UnsetType:
    """A whole choice's view of its prompt; unset if `num_top` says that none was asked for.

    The first token has no entry.
    """
    if num_top is None:
        return UNSET
    found = output.prompt_logprobs
    if found is None:  # a prompt of one token
        return [None]
    top_ids = [row[:num_top] for row in found.top_ids]
    top_logprobs = [row[:num_top] for row in found.top_logprobs]
    rows = zip(request.prompt_token_ids[1:], found.logprobs, found.ranks, top_ids, top_logprobs, strict=True)
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
