"""Log-probabilities in the formats of the replies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from eventlm.engine.backend import AnswerDelta
from eventlm.engine.request import Request
from eventlm.sampling_params import TokenLogprobs
from eventlm.server.errors import ApiError
from eventlm.server.openai.replies import (
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

#: vLLM's value for minus infinity, which JSON does not have.
SMALLEST_LOGPROB = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, output: ChoiceOutput, *, as_token_ids: bool, is_named: bool = False
) -> ChatLogprobs | None:
    """Those of a chat's output; None if they were not asked for. is_named: the request named the tokens to list, and
    the output's own comes before them.
    """
    if output.delta is not None:
        return ChatLogprobs(reported_logprobs(output.delta)) if output.delta.logprobs else None
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
        pairs = dict(zip(top_ids, top_logprobs, strict=True))
        top = [top_logprob(*pair) for pair in (({token_id: logprob} | pairs) if is_named else pairs).items()]
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


def reported_logprobs(delta: AnswerDelta) -> list[TokenLogprob]:
    """Those that a backend has told, as a chat has them."""
    found = _reported(delta)
    if isinstance(found, list):
        return found
    return [
        TokenLogprob(
            token,
            SMALLEST_LOGPROB if logprob is None else logprob,
            None,
            [TopLogprob(*pair) for pair in (top or {}).items()],
        )
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.alternatives, strict=True)
    ]


class _Columns(Struct):
    """Those of a completion, as a backend has told them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None

    @property
    def alternatives(self) -> list[dict[str, float] | None]:
        """Those of each token."""
        return self.top_logprobs or [None for _ in self.tokens]


def _reported(delta: AnswerDelta) -> list[TokenLogprob] | _Columns:
    """Raises ApiError if they are of no known form."""
    try:
        found = msgspec.json.decode(delta.logprobs or b"[]", type=list[TokenLogprob] | _Columns)
        if isinstance(found, list) or len(found.tokens) == len(found.token_logprobs) == len(found.alternatives):
            return found
    except msgspec.DecodeError:
        pass
    raise ApiError(
        502,
        "The log-probabilities that the backend of this model gave are of no known form; ask for none.",
        type="server_error",
        code="backend_protocol",
    )


class CompletionLogprobsMaker:
    """Makes those of completions, with `num_top` alternatives, for each output of each choice.

    num_named: how many tokens the request named, to be listed in place of the alternatives of an output.
    `echoed_characters`: length of the text before the output of a choice.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        num_named: int,
        skip_special_tokens: bool,
        as_token_ids: bool,
        echoed_characters: Callable[[int], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._num_listed = num_named or num_top
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.raw_token_bytes
        self._as_token_ids = as_token_ids
        self._echoed_characters = echoed_characters
        self._offsets: dict[int, _Offset] = {}
        #: Characters of what backends have told of each choice.
        self._num_reported: dict[int, int] = {}

    def output(self, output: ChoiceOutput) -> CompletionLogprobs | None:
        """Those of the next output of a choice; None if it has none."""
        if output.delta is not None:
            return self._reported(output.choice, output.delta)
        if output.logprobs is None:
            return None
        if output.choice not in self._offsets:
            self._offsets[output.choice] = _Offset(self._token_bytes, self._echoed_characters(output.choice))
        offset = self._offsets[output.choice]
        offsets = [offset.advance(token) for token in output.token_ids]
        return self._make(output.token_ids, output.logprobs, offsets, self._num_listed)

    def _reported(self, choice: int, delta: AnswerDelta) -> CompletionLogprobs | None:
        if not delta.logprobs:
            return None
        found = _reported(delta)
        if isinstance(found, list):
            found = _Columns(
                [entry.token for entry in found],
                [entry.logprob for entry in found],
                [
                    {entry.token: entry.logprob} | {each.token: each.logprob for each in entry.top_logprobs}
                    for entry in found
                ],
            )
        offsets = [*itertools.accumulate(map(len, found.tokens), initial=self._num_reported.get(choice, 0))]
        self._num_reported[choice] = offsets.pop()
        return CompletionLogprobs(found.tokens, found.token_logprobs, found.alternatives, offsets)

    def prompt_start(self, part: Echo) -> CompletionLogprobs:
        """The entry of the first token of an echoed prompt."""
        return CompletionLogprobs([self._text(part.token_ids[0])], [None], [None], list(part.text_offset))

    def prompt(self, part: Echo, found: TokenLogprobs) -> CompletionLogprobs:
        """Those of further tokens of an echoed prompt."""
        return self._make(part.token_ids, found, part.text_offset, self._num_top)

    def _make(
        self, token_ids: list[int], found: TokenLogprobs, text_offset: list[int], num_listed: int
    ) -> CompletionLogprobs:
        tokens = [self._text(token_id) for token_id in token_ids]
        logprobs = [max(logprob, SMALLEST_LOGPROB) for logprob in found.logprobs]
        top: list[dict[str, float] | None] = []
        for token, logprob, ids, values in zip(tokens, logprobs, found.top_ids, found.top_logprobs, strict=True):
            by_text = {token: logprob}
            for token_id, value in zip(ids[:num_listed], values[:num_listed], strict=True):
                # Parts of characters may have the same text; the most likely one is kept.
                text = self._text(token_id)
                by_text[text] = max(value, by_text.get(text, SMALLEST_LOGPROB))
            top.append(by_text)
        return CompletionLogprobs(tokens, list(logprobs), top, list(text_offset))

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, as_token_id=self._as_token_ids)


def join_logprobs(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs | None:
    """Consecutive parts as one; None if all are None."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    return CompletionLogprobs(
        [token for part in found for token in part.tokens],
        [logprob for part in found for logprob in part.token_logprobs],
        [top for part in found for top in part.top_logprobs],
        [offset for part in found for offset in part.text_offset],
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
) -> PromptLogprobs | None:
    """Those of the prompt, with `num_top` alternatives; None if that is None. The first token has no entry."""
    if num_top is None:
        return None
    found = output.prompt_logprobs
    if found is None:  # a prompt of one token
        return [None]
    return [
        None,
        *(
            {
                token_id: PromptLogprob(max(logprob, SMALLEST_LOGPROB), rank, token_text(tokenizer, token_id))
                for token_id, (logprob, rank) in row.items()
            }
            for row in found.by_token(request.prompt_token_ids[1:], num_top)
        ),
    ]
