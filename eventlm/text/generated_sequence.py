"""The state of one sequence whose tokens become text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventlm.engine.request import PromptLogprobsOutput, Request
from eventlm.sampling_params import TokenLogprobs
from eventlm.text.choice_output import ChoiceOutput, part_of
from eventlm.text.detokenizer import SequenceText
from eventlm.text.stop_strings import StopStrings
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import Formats
from eventlm.text.tools.message import end_of_call, message_format
from eventlm.text.tools.reasoning_tokens import ReasoningTokens, reasoning_tokens


class GeneratedSequence:
    """The text, the number of output tokens, and which log-probabilities of the prompt have come.

    num_reported_reasoning_tokens: as a backend counts them at the end, if it does.
    """

    __slots__ = (
        "_next_prompt_position",
        "last_token_id",
        "num_reported_reasoning_tokens",
        "num_tokens",
        "reasoning",
        "text",
    )

    def __init__(self, text: SequenceText, reasoning: ReasoningTokens | None) -> None:
        self.text = text
        self.reasoning = reasoning
        self.num_tokens = 0
        self.num_reported_reasoning_tokens: int | None = None
        self.last_token_id: int | None = None
        #: Nothing predicts the first token of a prompt.
        self._next_prompt_position = 1

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None if the format has no reasoning."""
        return self.num_reported_reasoning_tokens if self.reasoning is None else self.reasoning.count

    def output(self, choice: int, text: str = "", **more: Any) -> ChoiceOutput:
        """An output, with the counts up to now."""
        return ChoiceOutput(
            choice, text, num_tokens=self.num_tokens, num_reasoning_tokens=self.num_reasoning_tokens, **more
        )

    def new_prompt_logprobs(self, output: PromptLogprobsOutput) -> TokenLogprobs | None:
        """The log-probabilities that are new: a recomputed prompt repeats some."""
        num_known = self._next_prompt_position - output.start
        new = part_of(output.logprobs, num_known, None)
        assert new is not None
        self._next_prompt_position += len(new.logprobs)
        return new if new.logprobs else None


def generated_sequences(tokenizer: Tokenizer, request: Request, formats: Formats) -> list[GeneratedSequence]:
    """The sequences of a request, empty."""
    params = request.sampling
    format = message_format(request)
    include_stop = params.include_stop_str_in_output
    stops = StopStrings(params.stop_strings) if params.stop_strings else None
    token_bytes = text_bytes(tokenizer, request)
    ends = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else params.eos_token_ids)]
    return [
        GeneratedSequence(
            SequenceText(
                token_bytes,
                stops=stops,
                include_stop=include_stop,
                min_tokens=params.min_tokens,
                end_token_ids=frozenset(() if include_stop else ends),
                is_over=end_of_call(format, formats) if format.ends_after_call else None,
            ),
            reasoning_tokens(format, formats, token_bytes),
        )
        for _ in range(request.n)
    ]


def text_bytes(tokenizer: Tokenizer, request: Request) -> Callable[[int], bytes]:
    """The bytes that each token adds to the text."""
    if not request.sampling.skip_special_tokens:
        return tokenizer.raw_token_bytes
    if not request.visible_token_ids:
        return tokenizer.token_bytes
    visible = frozenset(request.visible_token_ids)
    return lambda token_id: (tokenizer.raw_token_bytes if token_id in visible else tokenizer.token_bytes)(token_id)
