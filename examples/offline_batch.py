"""Complete a batch of prompts without a server: `python offline_batch.py [MODEL]`. The default model is smollm2."""

import sys

from eventlm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "To make tea,"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=32)
    for output in llm.generate(PROMPTS, params):
        completion = output.outputs[0]
        print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
