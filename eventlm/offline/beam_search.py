"""Beam search by `LLM`, with vLLM's names and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, structs

from eventlm.engine.request import BeamSettings
from eventlm.field_errors import field_error, split_message
from eventlm.offline.outputs import RequestOutput, TokenLogprobDict
from eventlm.sampling_params import SamplingParams
from eventlm.text.protocol import MAX_N, LengthPenalty
from eventlm.text.tokenizer import Tokenizer


class BeamSearchParams(Struct, frozen=True):
    """A beam search that keeps `beam_width` beams of up to `max_tokens` tokens.

    A beam's score is the sum of its tokens' log-probabilities, divided by their number to the power of
    `length_penalty`. `temperature` has no effect, as nothing is drawn. The model's end of sequence ends a beam, unless
    `ignore_eos`. Raises InputError, a ValueError, where it is used.
    """

    beam_width: Annotated[int, Meta(ge=1, le=MAX_N)]
    max_tokens: Annotated[int, Meta(ge=1)]
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: LengthPenalty = 1.0
    include_stop_str_in_output: bool = False

    def checked(self) -> BeamSearchParams:
        """Itself. Raises InputError for a value out of its range."""
        try:
            return msgspec.convert(structs.asdict(self), BeamSearchParams)
        except msgspec.ValidationError as error:
            raise field_error(*split_message(str(error))) from error

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of its outputs."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=2 * self.beam_width,
        )

    @property
    def settings(self) -> BeamSettings:
        """What the search needs beside them."""
        return BeamSettings(self.beam_width, self.length_penalty)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens` and `text` are the prompt's and its own; `logprobs` are of its own tokens."""

    tokens: list[int]
    logprobs: list[TokenLogprobDict]
    cum_logprob: float
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """A prompt's output as a search reports it: without the token that ended a beam, unless it was asked for."""
    sequences = []
    for each in output.outputs:
        hides_end = each.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = output.prompt_token_ids + (each.token_ids[:-1] if hides_end else each.token_ids)
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=each.logprobs or [],
                cum_logprob=each.cumulative_logprob or 0.0,
                text=tokenizer.decode(tokens),
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)
