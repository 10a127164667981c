"""From prompts and sampling parameters to what the engine takes. Everything that can be wrong is found here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import structs

from eventlm.bootstrap.composition import Composition
from eventlm.engine.request import EngineRequest
from eventlm.errors import InputError
from eventlm.offline.errors import InvalidInputError
from eventlm.offline.prompts import Prompt
from eventlm.offline.sampling_params import SamplingParams
from eventlm.sampler_params import SMALLEST_TEMPERATURE, SamplerParams
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.prompt_encoder import bad_words_token_ids


class RequestMaker:
    """Makes the engine's requests. `seed`, if given, decides those of requests that bring none."""

    def __init__(self, composition: Composition, *, seed: int | None) -> None:
        self._engine = composition.engine
        self._tokenizer = composition.tokenizer
        self._eos_token_ids = composition.defaults.eos_token_ids
        self._vocab_size = composition.vocab_size
        self._grammars = GrammarChecker(list(self._tokenizer.special_bytes.values()))
        self._seed = seed
        self._numbers = itertools.count()

    def generation(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priorities: Sequence[int]
    ) -> list[EngineRequest]:
        """One request for each prompt. Raises InvalidInputError."""
        # Often one object stands for all prompts.
        converted: dict[int, SamplerParams] = {}
        group = []
        for prompt, each, priority in zip(prompts, params, priorities, strict=True):
            if id(each) not in converted:
                each.check()
                converted[id(each)] = self._convert(each)
            sampling = structs.replace(converted[id(each)], max_tokens=self._max_tokens(prompt, each))
            group.append(self._request(prompt, each, sampling, priority))
        return group

    def embedding(self, prompts: Sequence[Prompt]) -> list[EngineRequest]:
        """One request for each prompt. Raises InvalidInputError."""
        group = []
        for prompt in prompts:
            self._check_length(prompt, 0)
            group.append(
                EngineRequest(
                    model=self._engine.model_names[0],
                    prompt_token_ids=prompt.token_ids,
                    params=SamplerParams(max_tokens=0),
                    kind="pool",
                    cache_salt=prompt.cache_salt,
                    offline=True,
                )
            )
        return group

    def _request(self, prompt: Prompt, params: SamplingParams, sampling: SamplerParams, priority: int) -> EngineRequest:
        now_ns = self._engine.now_ns()
        return EngineRequest(
            model=self._engine.model_names[0],
            prompt_token_ids=prompt.token_ids,
            params=sampling,
            n=params.n,
            seed=self._draw_seed() if params.seed is None else params.seed % 2**64,
            # Nothing predicts what is not computed.
            skip_cache_read=params.prompt_logprobs is not None,
            cache_salt=prompt.cache_salt,
            priority=priority,
            stop=tuple(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            has_text_ends=bool(params.stop),
            waits_for_grammar=bool(sampling.grammar),
            offline=True,
            received_ns=now_ns,
            ready_ns=now_ns,
        )

    def _convert(self, params: SamplingParams) -> SamplerParams:
        """Parameters as the worker takes them, but for `max_tokens`, which depends on the prompt."""
        vocab_size = self._vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise InvalidInputError(f"{name} has the id {token_id}, but ids are from 0 to {vocab_size - 1}")
        return SamplerParams(
            temperature=float(params.temperature) if params.temperature >= SMALLEST_TEMPERATURE else 0.0,
            top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            logit_bias=tuple((token_id, float(bias)) for token_id, bias in (params.logit_bias or {}).items()),
            allowed_token_ids=tuple(params.allowed_token_ids or ()),
            bad_words=self._bad_words(params.bad_words or ()),
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            grammar=self._grammar(params),
            logprobs=self._num_logprobs(params.logprobs),
            prompt_logprobs=self._num_logprobs(params.prompt_logprobs),
        )

    def _grammar(self, params: SamplingParams) -> str:
        if params.structure is None:
            return ""
        try:
            return self._grammars.check_now(params.structure.requested())
        except InputError as error:
            raise InvalidInputError(str(error)) from error

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        try:
            return bad_words_token_ids(self._tokenizer, words)
        except InputError as error:
            raise InvalidInputError(str(error)) from error

    def _num_logprobs(self, asked: int | None) -> int | None:
        if asked is None:
            return None
        return self._vocab_size if asked < 0 else min(asked, self._vocab_size)

    def _max_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        self._check_length(prompt, params.max_tokens or max(params.min_tokens, 1))
        return params.max_tokens or self._engine.max_model_len - len(prompt.token_ids)

    def _check_length(self, prompt: Prompt, num_new_tokens: int) -> None:
        num_tokens, context = len(prompt.token_ids), self._engine.max_model_len
        if num_tokens + num_new_tokens > context:
            remedy = "shorten it" + (", or lower max_tokens" if num_tokens < context and num_new_tokens > 1 else "")
            new = f" and {num_new_tokens} to produce" if num_new_tokens else ""
            raise InvalidInputError(
                f"{prompt.place} is too long: {num_tokens} tokens{new} do not fit the context of {context} tokens; "
                f"{remedy}"
            )

    def _draw_seed(self) -> int | None:
        """The next seed of this `LLM`'s own stream; None lets the engine draw one."""
        if self._seed is None:
            return None
        digest = blake2b(f"{self._seed}/{next(self._numbers)}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
