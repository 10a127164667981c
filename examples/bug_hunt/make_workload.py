"""Print a workload of 600 requests: 14 a second, one in twenty with a long prompt. It is the same on every machine."""

import json
import random

rng = random.Random(7)
print(json.dumps({"t": "workload", "format": 1, "source": "bug hunt"}))
arrival_s = 0.0
for _ in range(600):
    arrival_s += rng.expovariate(14)
    is_long = rng.random() < 0.05
    prompt_tokens = rng.randrange(6000, 12000) if is_long else rng.randrange(200, 3000)
    request = {
        "arrival_s": round(arrival_s, 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": rng.randrange(20, 200),
    }
    print(json.dumps(request))
