"""What of the engine's work shows between the steps of a device that computes while the host goes on.

    python benchmarks/run_ahead.py [--batch 256] [--steps 300]

The device is the fake one, which takes a given time for a step whatever is in it, with one and with two steps shipped
ahead: with one, the engine's and the worker's work for a step lies between two of them; with two, it is hidden while a
step runs, unless it takes longer. On a GPU `benchmarks/gpu.py --sections gaps` measures the same. Nothing else should
run on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_harness.roofline import Gaps, gaps, read_steps
from eventlm import LLM, SamplingParams
from eventlm.table import table

PROMPT_TOKENS = 64


def measure(step_us: int, batch: int, num_steps: int, in_flight: int) -> Gaps:
    """Between steps of so many microseconds that decode a whole batch."""
    fake = {"base_ns": step_us * 1000, "prefill_token_ns": 0, "decode_ns": 0, "context_token_ns": 0}
    prompts: list[str | list[int]] = [[number % 200] * PROMPT_TOKENS for number in range(batch)]
    params = SamplingParams(max_tokens=num_steps, temperature=0, ignore_eos=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            "fake",
            fake=fake,
            max_num_seqs=batch,
            max_num_batched_tokens=8192,
            num_blocks=batch * (PROMPT_TOKENS + num_steps) // 16 + 2 * batch,
            max_model_len=PROMPT_TOKENS + num_steps,
            max_steps_in_flight=in_flight,
            record=folder,
        ) as llm,
    ):
        llm.generate(prompts, params, use_tqdm=False)
        assert llm.run_folder is not None
        steps = read_steps(Path(llm.run_folder), num_before=0, num_requests=batch)
    return gaps(steps, num_rows=batch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="sequences that decode (256)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each measurement (300)")
    parser.add_argument(
        "--step-us", type=int, nargs="+", default=[8000, 6000, 4000, 2000], help="times of a step (8000 6000 4000 2000)"
    )
    options = parser.parse_args(arguments)
    if min(options.batch, *options.step_us) < 1 or options.steps < 3:
        parser.error("--batch and --step-us are at least 1, --steps at least 3")
    rows = []
    for step_us in options.step_us:
        print(f"steps of {step_us / 1000:g} ms ...", file=sys.stderr, flush=True)
        found = [measure(step_us, options.batch, options.steps, in_flight) for in_flight in (1, 2)]
        rows.append(
            [
                f"{step_us / 1000:g} ms",
                *(cell for each in found for cell in (f"{each.period * 1e3:.2f} ms", f"{each.idle:.1%}")),
            ]
        )
    head = ["a step takes", "one in flight: period", "idle", "two: period", "idle"]
    print("\n".join(table(head, rows)))
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
