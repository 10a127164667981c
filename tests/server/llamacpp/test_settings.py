from __future__ import annotations

from msgspec import to_builtins

from eventlm.sampling_params import SamplingParams
from eventlm.server.llamacpp.request import LlamaCompletionRequest
from eventlm.server.llamacpp.settings import TokenBias, generation_settings


def test_the_defaults_are_the_models() -> None:
    found = to_builtins(generation_settings(SamplingParams(temperature=0.6, top_k=20, top_p=0.95)))
    assert (found["temperature"], found["top_k"], found["top_p"], found["seed"]) == (0.6, 20, 0.95, 2**32 - 1)
    assert (found["n_predict"], found["max_tokens"], found["stop"], found["logit_bias"]) == (-1, -1, [], [])
    assert found["samplers"] == ["temperature", "top_k", "top_p", "min_p", "penalties"]
    # What this server does not have is off.
    assert (found["mirostat"], found["dry_multiplier"], found["xtc_probability"], found["typical_p"]) == (0, 0, 0, 1)


def test_of_a_request() -> None:
    params = SamplingParams(seed=3, logprobs=2, stop=["a"], ignore_eos=True, logit_bias={5: 1.5}, eos_token_ids=(257,))
    params.bad_words_token_ids = ((7,), (8, 9))
    params.grammar = "root ::= [a-z]"
    body = LlamaCompletionRequest(prompt="a", n_predict=4, stream=True, samplers=["min_p", "dry", "top_k"])
    found = generation_settings(params, body)
    assert (found.n_predict, found.seed, found.n_probs, found.stop, found.stream) == (4, 3, 2, ["a"], True)
    assert found.grammar == "root ::= [a-z]"
    assert (found.samplers, found.repeat_last_n) == (["top_k", "min_p"], -1)
    assert generation_settings(params, LlamaCompletionRequest(prompt="a", repeat_last_n=0)).repeat_last_n == 0
    assert found.logit_bias == [TokenBias(5, 1.5), TokenBias(7, None), TokenBias(257, None)]
