"""Scores of tasks by lm-eval: `python -m tests.server.lm_eval_scores URL MODEL CHECKPOINT TASKS`.

Evaluates every task of the folder TASKS twice, by lm-eval's own `hf` backend on the checkpoint and by its
`local-completions` against the server at URL. Prints one JSON object: by backend and task, its metrics and what each
document got.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

MAX_LENGTH = 512
TASKS = ["local_choice", "local_cloze", "local_rolling", "local_generation"]


def evaluated(tasks: str, backend: str, /, **arguments: Any) -> dict[str, Any]:
    """Metrics and documents of all tasks."""
    manager = TaskManager(include_path=tasks, include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=backend, model_args=arguments, tasks=TASKS, task_manager=manager, batch_size=8, bootstrap_iters=0
    )
    assert found is not None
    documents = {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }
    metrics = {
        task: {name: float(value) for name, value in values.items() if name.endswith(",none") and value != "N/A"}
        for task, values in found["results"].items()
    }
    return {"metrics": metrics, "documents": documents}


def main() -> None:
    url, model, checkpoint, tasks = sys.argv[1:]
    scores = {
        # It keeps one token less for itself.
        "hf": evaluated(
            tasks, "hf", pretrained=checkpoint, dtype="float32", device="cpu", max_length=MAX_LENGTH - 1
        ),
        "local-completions": evaluated(
            tasks, "local-completions", base_url=f"{url}/v1/completions", model=model, tokenizer=checkpoint,
            tokenizer_backend="huggingface", max_length=MAX_LENGTH, num_concurrent=4, max_retries=1,
        ),
    }  # fmt: skip
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
