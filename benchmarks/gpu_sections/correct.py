"""Whether the engine on a GPU generates what transformers would: its tokens are put through transformers' own forward
pass, and at each place the token is compared with the most likely one there, its log-probability with the one there.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.gpu_harness.engines import NUM_PROMPT_TOKENS, Run, Workload, generate, start
from benchmarks.gpu_harness.row import Context, Part, Parts, Row, check
from eventlm.bus.trace_info import info
from eventlm.models.fetch.pull import cached
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

Dtype = Literal["float32", "bfloat16"]


class Sizes(NamedTuple):
    """Of the workload, in tokens: what every other prompt begins with, most of each prompt's own, of each output. So
    many blocks hold the longest context, and not all sequences.
    """

    num_seqs: int
    shared: int
    own: int
    output: int
    max_model_len: int
    num_blocks: int


SIZES = Sizes(num_seqs=24, shared=96, own=70, output=64, max_model_len=256, num_blocks=18)
SMOKE_SIZES = Sizes(num_seqs=3, shared=16, own=12, output=4, max_model_len=64, num_blocks=16)


class Bounds(NamedTuple):
    """Least share of tokens that are the most likely ones, and most difference of log-probabilities, in the mean."""

    agreement: float
    logprob: float


BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(0.999, 1e-3),
    "bfloat16": Bounds(0.97, 0.05),
    "fp8": Bounds(0.8, 0.2),
}


class Variant(NamedTuple):
    """An engine to compare. `options` are its own; `bounds` are named; in few blocks sequences are preempted."""

    name: str
    dtype: Dtype
    bounds: str
    options: dict[str, Any]
    family: Literal["llama", "qwen3"] = "llama"
    has_few_blocks: bool = False


CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
VARIANTS = (
    Variant("float32", "float32", "float32", {}),
    Variant("float32, Qwen3, chunks, preemption", "float32", "float32", CHUNKS, "qwen3", has_few_blocks=True),
    Variant("bfloat16, Qwen3, without graphs", "bfloat16", "bfloat16", {"cuda_graphs": False}, "qwen3"),
    Variant("bfloat16, fp8 KV", "bfloat16", "fp8", {"kv_cache_dtype": "fp8"}),
)
#: A smoke run has two of them: preemption takes more steps than are interpreted in reasonable time.
SMOKE_VARIANTS = (
    VARIANTS[1]._replace(name="float32, chunks", family="llama", has_few_blocks=False),
    VARIANTS[3]._replace(family="qwen3"),
)


def parts(context: Context) -> Parts:
    """Each variant on a checkpoint of its own, and the default model where it is there."""
    variants = SMOKE_VARIANTS if context.smoke else VARIANTS
    measured: dict[str, Part] = {each.name: functools.partial(_compare, context, each) for each in variants}
    default = cached("smollm2:bf16")
    if default is not None and not context.smoke:
        measured["the default model"] = functools.partial(_compare_default, context, default)
    return measured


def _compare(context: Context, variant: Variant) -> Iterator[Row]:
    sizes = SMOKE_SIZES if context.smoke else SIZES
    folder = Path(context.folder) / f"correct-{variant.family}-{variant.dtype}"
    if not folder.exists():
        make_checkpoint(
            folder,
            family=variant.family,
            num_heads=4,
            head_dim=32,
            num_layers=1 if context.smoke else 2,
            dtype=variant.dtype,
            tied=variant.family == "qwen3",
            max_position_embeddings=sizes.max_model_len,
        )
    workload = workload_of(sizes, VOCAB_SIZE)
    options = {"max_model_len": sizes.max_model_len} | variant.options
    if variant.has_few_blocks:
        options["num_blocks"] = sizes.num_blocks
    with start(context, folder, record=Path(context.folder) / "runs", **options) as llm:
        first = greedily(llm, workload)
        again = greedily(llm, workload)
        run_folder = llm.run_folder
    assert run_folder is not None
    for name, run in (("", first), (", prefix hits", again)):
        yield from compared(f"{variant.name}{name}", run, folder, variant.dtype, context.device, BOUNDS[variant.bounds])
    hits = sum(output.num_cached_tokens for output in again.outputs)
    yield check(f"{variant.name}: prompt tokens from the prefix cache", hits, "", at_least=1)
    if variant.has_few_blocks:
        yield check(f"{variant.name}: preemptions", info(run_folder).num_preemptions, "", at_least=1)


def _compare_default(context: Context, folder: Path) -> Iterator[Row]:
    with start(context, folder, max_model_len=SIZES.max_model_len) as llm:
        run = greedily(llm, workload_of(SIZES, NUM_PROMPT_TOKENS))
    yield from compared("the default model, bfloat16", run, folder, "bfloat16", context.device, BOUNDS["bfloat16"])


def workload_of(sizes: Sizes, vocab_size: int) -> Workload:
    """Prompts of all lengths, of which some begin alike."""
    draw = random.Random(1)
    shared = [draw.randrange(5, vocab_size) for _ in range(sizes.shared)]
    own = [[draw.randrange(5, vocab_size) for _ in range(draw.randint(1, sizes.own))] for _ in range(sizes.num_seqs)]
    prompts = [shared * (index % 2) + tokens for index, tokens in enumerate(own)]
    return Workload(prompts, [sizes.output] * sizes.num_seqs)


def greedily(llm: Any, workload: Workload) -> Run:
    """The most likely tokens of each prompt, with their log-probabilities."""
    return generate(llm, workload, temperature=0.0, logprobs=0)


def compared(name: str, run: Run, folder: Path, dtype: Dtype, device: str, bounds: Bounds) -> Iterator[Row]:
    """Greedy outputs beside transformers' forward pass of the folder's model."""
    agreement, difference = teacher_forced(run, folder, dtype, device)
    yield check(f"{name}: tokens as transformers has them", agreement, "", at_least=bounds.agreement)
    yield check(f"{name}: difference of log-probabilities", difference, "", at_most=bounds.logprob)


class Likeness(NamedTuple):
    """Share of the tokens that are the most likely ones, and mean difference of their log-probabilities."""

    agreement: float
    difference: float


@torch.no_grad()
def teacher_forced(run: Run, folder: Path, dtype: Dtype, device: str) -> Likeness:
    """What transformers' forward pass of the folder's model makes of the tokens of greedy outputs, each after those
    before it.
    """
    from transformers import AutoModelForCausalLM

    # Other implementations leave out soft caps in some versions.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    model = model.to(device).eval()
    num_same, differences = 0, []
    for output in run.outputs:
        completion = output.outputs[0]
        tokens = torch.tensor(completion.token_ids, device=device)
        ids = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]], device=device)
        logits_OV = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        num_same += int((logits_OV.argmax(-1) == tokens).sum())
        theirs = logits_OV.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        differences += [abs(own - their) for own, their in zip(_logprobs(completion), theirs, strict=True)]
    return Likeness(num_same / len(differences), sum(differences) / len(differences))


def _logprobs(completion: Any) -> Sequence[float]:
    """Of its own tokens."""
    return [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
