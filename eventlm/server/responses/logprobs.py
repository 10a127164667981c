"""Log-probabilities of the tokens of messages, apart from those of reasoning, of calls and of the marks around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from eventlm.engine.request import Request
from eventlm.server.openai.logprobs import chat_logprobs
from eventlm.server.openai.replies import TokenLogprob
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.detokenizer import Detokenizer
from eventlm.text.generated_sequence import text_bytes
from eventlm.text.tokenizer import Tokenizer


class _Token(NamedTuple):
    """A token, and how many characters of the text it completed."""

    logprob: TokenLogprob
    num_characters: int


class TokenTexts:
    """Cuts the text of one sequence into that of its tokens, and knows which of them a message has."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(text_bytes(tokenizer, request))
        #: Tokens whose text has not come, since it is held back, and what has come of it.
        self._ahead: deque[_Token] = deque()
        self._text = ""
        #: Tokens whose text has come, since the last part of the message.
        self._since: list[_Token] = []

    def pieces(self, output: ChoiceOutput) -> Iterator[str]:
        """The text of the next output, cut where its tokens end."""
        for token_id, logprob in zip(output.token_ids, token_logprobs(self._tokenizer, output), strict=True):
            self._ahead.append(_Token(logprob, len(self._detokenizer.push([token_id]))))
        self._text += output.text
        while self._ahead and (end := self._ahead[0].num_characters) <= len(self._text):
            self._since.append(self._ahead.popleft())
            text, self._text = self._text[:end], self._text[end:]
            yield text
        if output.finished is not None:
            self._since += self._ahead
            self._ahead.clear()
            text, self._text = self._text, ""
            yield text

    def of_content(self, num_characters: int) -> list[TokenLogprob]:
        """The tokens of a text of the message that ends where the last piece does, or before."""
        tokens, self._since = self._since, []
        start = len(tokens)
        while start and (num_characters > 0 or not tokens[start - 1].num_characters):
            start -= 1
            num_characters -= tokens[start].num_characters
        return [token.logprob for token in tokens[start:]]

    def rest(self) -> list[TokenLogprob]:
        """The tokens after the last text."""
        return [token.logprob for token in self._since]

    def skip(self) -> None:
        """The text up to here is not the message's."""
        self._since = []


def token_logprobs(tokenizer: Tokenizer, output: ChoiceOutput) -> list[TokenLogprob]:
    """Those of all tokens of an output."""
    found = chat_logprobs(tokenizer, output, as_token_ids=False)
    return [] if found is None else found.content
