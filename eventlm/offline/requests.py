"""From prompts and sampling parameters to what the engine takes. Everything that can be wrong is found here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import structs

from eventlm.bootstrap.composition import Composition
from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.offline.errors import InvalidInputError
from eventlm.offline.prompts import Prompt
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.text.grammar import structured_outputs_grammar
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.prompt_encoder import bad_words_token_ids
from eventlm.text.sampling import check_known_tokens, resolved


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
    ) -> list[Request]:
        """One request for each prompt. Raises InvalidInputError."""
        # Often one object stands for all prompts.
        resolved_by_id: dict[int, SamplingParams] = {}
        group = []
        for prompt, each, priority in zip(prompts, params, priorities, strict=True):
            if id(each) not in resolved_by_id:
                resolved_by_id[id(each)] = self._resolved(each)
            group.append(self._request(prompt, resolved_by_id[id(each)], priority))
        return group

    def embedding(self, prompts: Sequence[Prompt]) -> list[Request]:
        """One request for each prompt. Raises InvalidInputError."""
        group = []
        for prompt in prompts:
            self._check_length(prompt, 0)
            group.append(
                Request(
                    prompt_token_ids=prompt.token_ids,
                    sampling=SamplingParams(max_tokens=None),
                    cache_salt=prompt.cache_salt,
                    scheduling=SchedulingParams(model=self._engine.model_names[0], kind="pool", offline=True),
                )
            )
        return group

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> Request:
        now_ns = self._engine.now_ns()
        seed = self._draw_seed() if params.seed is None else params.seed
        return Request(
            prompt_token_ids=prompt.token_ids,
            sampling=structs.replace(params, seed=seed, max_tokens=self._max_tokens(prompt, params)),
            cache_salt=prompt.cache_salt,
            scheduling=SchedulingParams(
                model=self._engine.model_names[0],
                # Only what is computed has log-probabilities.
                skip_cache_read=params.prompt_logprobs is not None,
                priority=priority,
                has_text_ends=bool(params.stop),
                waits_for_grammar=bool(params.grammar),
                offline=True,
                received_ns=now_ns,
                ready_ns=now_ns,
            ),
        )

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """As the worker takes them, except for `max_tokens`, which depends on the prompt."""
        params.check()
        if params.n > 1 and params.temperature == 0:
            raise InputError("n", f"n is {params.n} at temperature 0: all completions would be the same")
        check_known_tokens(params, self._vocab_size)
        grammar = ""
        if params.structure is not None:
            grammar = self._grammars.check_now(structured_outputs_grammar(params.structure))
        return resolved(
            params,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            bad_words_token_ids=bad_words_token_ids(self._tokenizer, params.bad_words or ()),
            grammar=grammar,
        )

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
