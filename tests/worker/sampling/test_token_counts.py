from __future__ import annotations

import random
from collections import Counter

import numpy as np

from eventlm.worker.sampling.token_counts import TokenCounts


def test_rows_count_what_was_appended_to_any_history() -> None:
    rng = random.Random(1)
    counts = TokenCounts()
    outputs: dict[int, Counter[int]] = {}
    prompts: dict[int, set[int]] = {}
    for turn in range(300):
        if not outputs or rng.random() < 0.1:
            history = [rng.randrange(200) for _ in range(rng.randrange(1, 150))]
            num_prompt = rng.randrange(1, len(history) + 1)
            row = counts.add(history, num_prompt)
            assert row not in outputs
            prompts[row], outputs[row] = set(history[:num_prompt]), Counter(history[num_prompt:])
        elif rng.random() < 0.05:
            row = rng.choice(sorted(outputs))
            counts.remove(row)
            del prompts[row], outputs[row]
        rows = rng.sample(sorted(outputs), rng.randrange(1, len(outputs) + 1)) if outputs else []
        if not rows:
            continue
        tokens = [rng.randrange(200 + turn) for _ in rows]
        counts.append(np.array(rows), np.array(tokens))
        for row, token in zip(rows, tokens, strict=True):
            outputs[row][token] += 1
        taken = counts.take(np.array(rows))
        for row, ids, numbers in zip(rows, taken.ids.tolist(), taken.counts.tolist(), strict=True):
            different = len(prompts[row] | set(outputs[row]))
            assert set(ids[different:]) <= {-1}
            assert dict(zip(ids[:different], numbers, strict=False)) == {
                token: outputs[row][token] for token in prompts[row] | set(outputs[row])
            }
