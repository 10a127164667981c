"""Sampling parameters.

`SamplingParams` is the one definition: Python callers use it, the fields of the HTTP API are derived from it, and
workers sample by it. The types of the fields have their limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, StructMeta, structs

from eventlm.errors import InputError, InvalidTypeError
from eventlm.field_errors import field_error, split_message

#: How a prompt becomes one vector: its last token's hidden state, or the mean of all of them.
Pooling = Literal["last", "mean"]

#: Below this, division by the temperature overflows; such requests are greedy.
SMALLEST_TEMPERATURE = 1e-5
#: Any positive number makes sense; bounded so that no logit overflows.
SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 0.001, 1000.0
#: OpenAI's bounds of presence and frequency penalty, either way.
LARGEST_PENALTY = 2.0
#: OpenAI's bound. A larger bias changes nothing.
LARGEST_LOGIT_BIAS = 100.0
#: Workers have 32-bit integers.
_LARGEST_INT = 2**31 - 1
#: vLLM's bound, unless its environment says otherwise.
LARGEST_N = 16_384

Penalty = Annotated[float, Meta(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)]
RepetitionPenalty = Annotated[float, Meta(ge=SMALLEST_REPETITION_PENALTY, le=LARGEST_REPETITION_PENALTY)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
TokenId = Annotated[int, Meta(ge=0)]
LogitBias = Annotated[float, Meta(ge=-LARGEST_LOGIT_BIAS, le=LARGEST_LOGIT_BIAS)]
Text = Annotated[str, Meta(min_length=1)]
#: How many alternatives; -1: the whole vocabulary.
NumLogprobs = Annotated[int, Meta(ge=-1, le=_LARGEST_INT)]


class StructuredOutputsParams(Struct, forbid_unknown_fields=True):
    """What a completion must match: exactly one of the first five fields. The names are vLLM's.

        StructuredOutputsParams(json={"type": "object", ...})      a JSON schema, or its text
        StructuredOutputsParams(regex=r"\\d{4}")                    the whole text
        StructuredOutputsParams(choice=["yes", "no"])
        StructuredOutputsParams(grammar='start: "a" | "b"')        Lark, or GBNF

    `disable_any_whitespace` allows no whitespace between the tokens of JSON, `whitespace_pattern` (a regular
    expression) what it matches. `disable_fallback` has no effect: there is no fallback.
    `disable_additional_properties` and `structural_tag` are refused.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class _CheckedWhenCalled(StructMeta):
    """A class whose instances are checked when a caller makes one, but not when they are copied or decoded."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        params = super().__call__(*args, **kwargs)
        params.check()
        return params


class SamplingParams(Struct, omit_defaults=True, metaclass=_CheckedWhenCalled):
    """Parameters of one or many prompts, with vLLM's names and defaults.

        SamplingParams(temperature=0, max_tokens=64)                greedy
        SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=1)    four completions, the same at every call

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 keep the whole vocabulary.
    `repetition_penalty` divides or multiplies the logits of tokens in the prompt or the output (Keskar et al., 2019);
    `presence_penalty` and `frequency_penalty` are subtracted from those of the output (OpenAI's definition). `seed`
    None or -1 draws another one for each request. `stop` strings end a completion before them, or after them with
    `include_stop_str_in_output`; `stop_token_ids` end it too, and so does the model's end of sequence unless
    `ignore_eos`. `min_tokens` come before any of these. `max_tokens` None is as many as the context holds. `logprobs`
    and `prompt_logprobs` ask for the log-probability of each token, of the logits before anything else here changes
    them, and of that many of the most likely ones, -1 for the whole vocabulary; `logprob_token_ids` of these tokens in
    place of the most likely ones of an output. `bad_words` are never completed; only
    `allowed_token_ids`, if given, are drawn; `logit_bias` is added to the logits of its token ids.
    `skip_special_tokens` leaves them out of the text. `structured_outputs` says what the whole text must match;
    `guided_decoding` is its older name.

    The last four fields are not for callers: `eventlm.text.request_builder` sets them. `eos_token_ids` are the model's
    ends. The last token of each of `bad_words_token_ids` cannot be drawn after its others in the output. `grammar`
    (llguidance's: Lark, or JSON that wraps one) is what the output must match. `pooling` is for requests of the kind
    `pool`, which are not sampled; a mean needs every hidden state of the prompt, so such a request skips cache reads.

    Raises InputError, a ValueError, that names the parameter.
    """

    n: Annotated[int, Meta(ge=1, le=LARGEST_N)] = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_LARGEST_INT)] = 0
    min_p: MinP = 0.0
    seed: int | None = None
    stop: str | list[Text] | None = []
    stop_token_ids: list[TokenId] | None = []
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=_LARGEST_INT)] | None = 16
    min_tokens: Annotated[int, Meta(ge=0, le=_LARGEST_INT)] = 0
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[TokenId, LogitBias] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[Text] | None = []
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None

    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    pooling: Pooling = "last"

    def check(self) -> None:
        """Bring lists into form and raise InputError for a value out of its range.

        The fields may be assigned to, so a request's parameters are checked again where it enters the engine.
        """
        self.stop = _items("stop", self.stop_strings)
        self.stop_token_ids = _items("stop_token_ids", self.stop_token_ids)
        self.bad_words = _items("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _items("allowed_token_ids", self.allowed_token_ids)
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = _items("logprob_token_ids", self.logprob_token_ids)
            self.logprobs = 0 if self.logprobs is None else self.logprobs
        self.seed = None if self.seed == -1 else self.seed
        # As in vLLM, true asks for one.
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        try:
            checked: Any = msgspec.convert(self, _Checked, from_attributes=True)
        except msgspec.ValidationError as error:
            problem, path = split_message(str(error))
            raise field_error(problem, path, getattr(self, path, None)) from error
        if self.structured_outputs is not None:
            self.structured_outputs = _checked_structure("structured_outputs", checked.structured_outputs)
        if self.guided_decoding is not None:
            self.guided_decoding = _checked_structure("guided_decoding", checked.guided_decoding)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InputError("seed", "Invalid value for 'seed': expected an integer of at most 64 bits.")
        _check_texts("stop", self.stop)
        _check_texts("bad_words", self.bad_words)
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) == []:
                raise InputError(name, f"Invalid value for '{name}': it is empty.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                "min_tokens",
                f"Invalid value for 'min_tokens': {self.min_tokens} is more than max_tokens, which is "
                f"{self.max_tokens}.",
            )
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InputError(
                "guided_decoding",
                "Invalid value for 'guided_decoding': it is the older name of 'structured_outputs'; give one of them.",
            )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What the text must match, by either name."""
        return self.structured_outputs or self.guided_decoding

    @property
    def noise_seed(self) -> int:
        """The seed in force as an unsigned 64-bit integer. The engine has set it if the request had none."""
        return (self.seed or 0) % 2**64

    @property
    def num_listed_logprobs(self) -> int | None:
        """How many tokens the log-probabilities of an output token list, -1 for all; None: there are none."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def for_worker(self, seed: int) -> SamplingParams:
        """With the seed in force and without texts: workers and records have token ids only."""
        return structs.replace(self, seed=seed, stop=[], bad_words=[], structured_outputs=None, guided_decoding=None)


_Checked = msgspec.defstruct("_Checked", [(field.name, field.type) for field in structs.fields(SamplingParams)])


def _checked_structure(name: str, given: StructuredOutputsParams) -> StructuredOutputsParams:
    try:
        return msgspec.convert(structs.asdict(given), StructuredOutputsParams)
    except msgspec.ValidationError as error:
        problem, path = split_message(str(error))
        raise field_error(problem, f"{name}.{path}") from error


def _items(name: str, given: Any) -> list[Any]:
    if given is None or given == []:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence | set | frozenset):
        raise InvalidTypeError(name, f"Invalid type for '{name}': expected a list, got {given!r}.")
    try:
        # Duplicates are dropped.
        return list(dict.fromkeys(sorted(given) if isinstance(given, set | frozenset) else given))
    except TypeError:
        # An item has a wrong type, which the check of the items reports.
        return list(given)


def _check_texts(name: str, texts: Any) -> None:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            param = f"{name}[{index}]"
            raise InputError(
                param, f"Invalid value for '{param}': it is not valid text, it has a lone surrogate at {error.start}."
            ) from error


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of consecutive tokens, with one entry of each list per token.

    logprobs: the token's own. ranks: its index among all by likelihood, from 1. top_ids, top_logprobs: the most
    likely tokens, best first, as many as were asked for, or the tokens that were asked for.
    """

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def by_token(self, token_ids: Sequence[int], num_top: int | None = None) -> Iterator[dict[int, tuple[float, int]]]:
        """For each token, (log-probability, rank) by id: its own, then those of the `num_top` most likely ones."""
        rows = zip(token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs, strict=True)
        for token_id, own, own_rank, top_ids, top_logprobs in rows:
            top = zip(top_ids[:num_top], top_logprobs[:num_top], strict=True)
            found = {token_id: (own, own_rank)}
            for rank, (top_id, logprob) in enumerate(top, start=1):
                found.setdefault(top_id, (logprob, rank))
            yield found
