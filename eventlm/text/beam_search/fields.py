"""The fields of a body that ask for a beam search, and those that cannot stand beside them."""

from __future__ import annotations

from typing import Any

from eventlm.engine.request import BeamSettings
from eventlm.errors import InputError
from eventlm.sampling_params import SamplingParams
from eventlm.text.protocol import CompletionRequest, SearchableRequest

#: What a search does not follow, each with the values that ask for nothing. Temperature, top_p, top_k, min_p and seed
#: are for draws, and a search draws nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stop": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
}


def requested_beams(body: SearchableRequest, params: SamplingParams, vocab_size: int) -> BeamSettings | None:
    """The search that a body asks for; None if it asks for none. params: the body's, resolved. Raises InputError."""
    if not body.use_beam_search:
        for name, is_given in (
            ("beam_width", body.beam_width is not None),
            ("length_penalty", body.length_penalty not in (None, 1)),
        ):
            if is_given:
                raise InputError(name, f"'{name}' is for beam search: set 'use_beam_search' to true or leave it out.")
        return None
    for name, neutral in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InputError(name, f"'{name}' is not supported with beam search; leave it out.")
    if params.grammar:
        raise InputError(
            "use_beam_search",
            "'use_beam_search' cannot follow a structure; leave out response_format, structured_outputs and tools that "
            "force a call.",
        )
    return _settings(body, params, vocab_size)


def _settings(body: SearchableRequest, params: SamplingParams, vocab_size: int) -> BeamSettings:
    widths = {"beam_width": body.beam_width}
    if isinstance(body, CompletionRequest):
        if not body.generates or body.num_prompt_logprobs is not None:
            raise InputError("echo", "'echo' with 'logprobs' or without output is not supported with beam search.")
        widths["best_of"] = body.best_of
    given = {name: width for name, width in widths.items() if width is not None} or {"n": params.n}
    if len(set(given.values())) > 1:
        raise InputError("best_of", "'best_of' and 'beam_width' are two names of the same; give one of them.")
    [(name, width), *_] = given.items()
    if width < params.n:
        raise InputError(name, f"Invalid value for '{name}': it is less than 'n', which is {params.n}.")
    num_ends = len(params.stop_token_ids or ()) + len(params.eos_token_ids)
    if width + num_ends > vocab_size:
        raise InputError(name, f"Invalid value for '{name}': the model has only {vocab_size} tokens.")
    return BeamSettings(width, 1.0 if body.length_penalty is None else body.length_penalty)
