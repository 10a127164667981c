"""What each way to compute a model costs in accuracy: perplexity over a fixed text, and the distance from float32.

    python benchmarks/perplexity.py [--model MODEL] [--paths amx avx2 ...] [--also OPTIONS] [--tokens N] [--json FILE]

The text is `benchmarks/data/python_reference.txt`, the same bytes each time. It goes through the worker's own forward
pass and KV cache, in windows of 1,024 tokens of which the first half is context for the second (of the first window
all is scored), as prompts go: in steps of `--chunk-tokens`; 1 gives each token a decode of its own.

`--also model=MODEL` puts another model beside it that has the same tokens, such as a GGUF file of it.

The reference is transformers in float32 with the same weights, which it unpacks itself if they are a GGUF file's. KL
divergence is that of the distribution of each next token from the reference's, in nats; "same top" is how often the
most likely token is the same; "logits" is the root mean square of the difference of all logits over that of the
reference's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventlm.bootstrap.model_source import find_model
from eventlm.config import ModelConfig
from eventlm.config.load import load_config
from eventlm.config.options import options as known_options
from eventlm.errors import EventLMError, UsageError
from eventlm.kernels.cpu import native
from eventlm.models.config import read_model
from eventlm.models.fetch.default_model import CONVERTED, DEFAULT_MODEL
from eventlm.models.gguf.source import read_source
from eventlm.sampling_params import SamplingParams
from eventlm.system.processors import usable_cores
from eventlm.table import table
from eventlm.text.tokenizer import CheckpointTokenizer
from eventlm.types import ceil_div
from eventlm.worker.forward import make_cache, make_forward
from eventlm.worker.protocol import NewSequence, WorkerSetup
from eventlm.worker.sequence_table import Row, WorkerSequence

TEXT = Path(__file__).with_name("data") / "python_reference.txt"
TEXT_SHA256 = "3950a27c696887aeb33f9b141c17d83bd05d0850b940c7055195eb159521aade"
REFERENCE = "transformers float32"
_BLOCK_SIZE = 16
#: What `--also` takes: the options that say how a worker computes, and what.
_OPTIONS = ("dtype", "quantization", "kv_cache_dtype", "cpu_kernels", "model")

#: Logits [n, V], float32, after each of the last n of some tokens.
LogitsOf = Callable[[list[int], int], Tensor]


class Way(NamedTuple):
    """How to compute: options of the worker, or a dtype of transformers'."""

    worker: dict[str, Any] | None = None
    transformers_dtype: str = ""


WAYS: dict[str, Way] = {
    REFERENCE: Way(transformers_dtype="float32"),
    "transformers bfloat16": Way(transformers_dtype="bfloat16"),
    "torch float32": Way({"cpu_kernels": "torch", "dtype": "float32"}),
    "torch bfloat16": Way({"cpu_kernels": "torch", "dtype": "bfloat16"}),
    **{build: Way({"cpu_kernels": build, "dtype": "bfloat16"}) for build in native.BUILDS},
}


class Window(NamedTuple):
    """Tokens [start, end) of the text; those from `first` on are scored, each by what stands before it."""

    start: int
    first: int
    end: int


class Score(NamedTuple):
    """Sums over the tokens that were scored, and the largest divergence."""

    num_tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    max_divergence: float = 0.0
    num_same_top: int = 0
    squared_difference: float = 0.0
    squared_reference: float = 0.0

    def plus(self, other: Score) -> Score:
        """Of the tokens of both."""
        largest = max(self.max_divergence, other.max_divergence)
        return Score._make(one + two for one, two in zip(self, other, strict=True))._replace(max_divergence=largest)

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.num_tokens)


def windows(num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows that score each token but the first once, after `length - stride` others or all that there are."""
    first = 1
    while first < num_tokens:
        end = min(length if first == 1 else first + stride, num_tokens)
        yield Window(max(0, end - length), first, end)
        first = end


def read_text(path: Path = TEXT) -> str:
    """Raises UsageError if it is not the text that the reference figures are for."""
    data = path.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != TEXT_SHA256:
        raise UsageError(f"{path}: its SHA-256 is {found}, not {TEXT_SHA256}; take the file as it was published")
    return data.decode()


def in_transformers(folder: Path, dtype: str) -> LogitsOf:
    """The model in transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if (source := read_source(folder)) is not None:
        file = Path(source.parts[0].path)
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype)).eval()
    return lambda token_ids, num_last: model(torch.tensor([token_ids]), logits_to_keep=num_last).logits[0].float()


def in_worker(folder: Path, length: int, chunk_tokens: int, options: dict[str, Any]) -> LogitsOf:
    """The model, or the one that the options name, as a worker with them runs it.

    Raises UsageError, CheckpointError, CacheMemoryError.
    """
    options = dict(options)
    if model := options.pop("model", ""):
        folder = folder_of(model)
    num_blocks = ceil_div(length, _BLOCK_SIZE)
    setup = WorkerSetup(
        replica=0,
        epoch=1,
        model=str(folder),
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=length,
        max_num_batched_tokens=chunk_tokens,
        max_num_seqs=1,
        threads=torch.get_num_threads(),
        **options,
    )
    config = read_model(folder)
    forward = make_forward(setup, config, make_cache(setup, config))

    def logits_of(token_ids: list[int], num_last: int) -> Tensor:
        count = len(token_ids)
        new = NewSequence(request=0, index=0, token_ids=token_ids, num_prompt_tokens=count, params=SamplingParams())
        sequence = WorkerSequence(new)
        # In no order, as a pool that has been in use gives them.
        sequence.block_table.extend(range(num_blocks - 1, -1, -1))
        steps = [
            Row(sequence, start, min(chunk_tokens, count - start), samples=False)
            for start in range(0, count, chunk_tokens)
        ]
        return forward.logits(torch.cat([forward.run([step], None) for step in steps])[-num_last:]).float()

    return logits_of


def score(logits_TV: Tensor, expected_TV: Tensor, targets_T: Tensor) -> Score:
    """Of tokens with these logits before them, beside the reference's logits."""
    logprobs_TV, own_TV = expected_TV.log_softmax(dim=-1), logits_TV.log_softmax(dim=-1)
    divergence_T = (logprobs_TV.exp() * (logprobs_TV - own_TV)).sum(dim=-1, dtype=torch.float64).clamp(min=0)
    surprise_T = -own_TV.gather(1, targets_T[:, None]).double()
    return Score(
        num_tokens=len(targets_T),
        surprise=float(surprise_T.sum()),
        divergence=float(divergence_T.sum()),
        max_divergence=float(divergence_T.max()),
        num_same_top=int((logits_TV.argmax(dim=-1) == expected_TV.argmax(dim=-1)).sum()),
        squared_difference=float((logits_TV - expected_TV).square().sum(dtype=torch.float64)),
        squared_reference=float(expected_TV.square().sum(dtype=torch.float64)),
    )


@torch.inference_mode()
def measure(token_ids: Sequence[int], ways: dict[str, LogitsOf], length: int, stride: int) -> dict[str, Score]:
    """Scores of each way; the first one is the reference. All go over a window before the next one: Ctrl-C leaves those
    of the windows so far.
    """
    scores = dict.fromkeys(ways, Score())
    spans = list(windows(len(token_ids), length, stride))
    try:
        for number, span in enumerate(spans):
            print(f"window {number + 1} of {len(spans)}", end="\r", file=sys.stderr, flush=True)
            own = score_window(token_ids, ways, span)
            scores = {name: scores[name].plus(own[name]) for name in ways}
    except KeyboardInterrupt:
        if not scores[REFERENCE].num_tokens:
            raise
    print(" " * 40, end="\r", file=sys.stderr)
    return scores


def score_window(token_ids: Sequence[int], ways: dict[str, LogitsOf], span: Window) -> dict[str, Score]:
    """Of each way."""
    # There is nothing to score after the last token.
    inputs = list(token_ids[span.start : span.end - 1])
    targets_T = torch.tensor(token_ids[span.first : span.end])
    expected_TV: Tensor | None = None
    scores = {}
    for name, logits_of in ways.items():
        logits_TV = logits_of(inputs, len(targets_T))
        expected_TV = logits_TV if expected_TV is None else expected_TV
        scores[name] = score(logits_TV, expected_TV, targets_T)
    return scores


def summary(scores: dict[str, Score]) -> dict[str, dict[str, float]]:
    """The figures of each way, by name."""
    reference = scores[REFERENCE].perplexity
    return {
        name: {
            "perplexity": each.perplexity,
            "change_percent": 100 * (each.perplexity / reference - 1),
            "mean_kl_nats": each.divergence / each.num_tokens,
            "max_kl_nats": each.max_divergence,
            "same_top_percent": 100 * each.num_same_top / each.num_tokens,
            "logits_error_percent": 100 * math.sqrt(each.squared_difference / each.squared_reference),
        }
        for name, each in scores.items()
    }


def render(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    """The lines of the table."""
    columns = ("path", "perplexity", "change %", "mean KL", "max KL", "same top %", "logits %")
    formats = (".4f", "+.3f", ".2e", ".2e", ".2f", ".3f")
    rows = [
        [name, *(format(value, how) for value, how in zip(values.values(), formats, strict=True))]
        for name, values in figures.items()
    ]
    return table(columns, rows)


def folder_of(model: str) -> Path:
    """Of a model as `eventlm serve` takes it. Raises UsageError, CheckpointError, PullError."""
    folder = find_model(ModelConfig(model=model)).folder
    if folder is None:
        raise UsageError(f"{model} has no weights")
    return folder


def worker_way(text: str) -> Way:
    """Of `--also`. Raises UsageError for what is none of the options, and for a value that one does not take."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if any(name not in _OPTIONS or not sign for name, sign, _ in pairs):
        raise UsageError(f"--also {text}: say NAME=VALUE[,NAME=VALUE], with a NAME of {', '.join(_OPTIONS)}")
    given = {name: value for name, _, value in pairs}
    try:
        config = load_config(None, given, environment={}, are_flags=False)
    except UsageError as error:
        raise UsageError(f"--also {text}: {error}") from error
    return Way({name: getattr(getattr(config, known_options()[name].section), name) for name in given})


def available(name: str) -> bool:
    """Whether this machine can compute that way."""
    return name not in native.BUILDS or name in native.available_builds()


def run(arguments: argparse.Namespace) -> None:
    """Raises EventLMError for a model or a way that cannot be had."""
    torch.set_num_threads(arguments.threads or usable_cores())
    folder = folder_of(arguments.model)
    token_ids = CheckpointTokenizer(folder).encode(read_text(), add_special_tokens=False)[: arguments.tokens]
    names = [REFERENCE, *(name for name in arguments.paths or filter(available, WAYS) if name != REFERENCE)]
    wanted = {name: WAYS[name] for name in names} | {text: worker_way(text) for text in arguments.also}
    ways = {}
    for name, (options, dtype) in wanted.items():
        ways[name] = (
            in_transformers(folder, dtype)
            if options is None
            else in_worker(folder, arguments.window, arguments.chunk_tokens, options)
        )
    scores = measure(token_ids, ways, arguments.window, arguments.stride)
    figures = summary(scores)
    settings = {
        "model": arguments.model,
        "tokens": scores[REFERENCE].num_tokens,
        "window": arguments.window,
        "stride": arguments.stride,
        "chunk_tokens": arguments.chunk_tokens,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items()))
    print("\n".join(render(figures)))
    if arguments.json:
        arguments.json.write_text(json.dumps({**settings, "text_sha256": TEXT_SHA256, "paths": figures}, indent=2))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL + CONVERTED, help="as `eventlm serve` takes it (default: %(default)s)"
    )
    parser.add_argument(
        "--paths", nargs="+", choices=WAYS, metavar="PATH", help=f"of {', '.join(map(repr, WAYS))}; all that can run"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=VALUE[,...]",
        help="one more path, a worker with these options; can be repeated",
    )
    parser.add_argument("--tokens", type=int, help="only so many, from the beginning of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens that the model sees at once")
    parser.add_argument("--stride", type=int, default=512, help="tokens from one window to the next")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="tokens of a window that go into one step")
    parser.add_argument("--threads", type=int, default=0, help="all processors if left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures as well")
    arguments = parser.parse_args()
    if not 0 < arguments.stride < arguments.window or arguments.chunk_tokens < 1:
        parser.error("--stride lies between 0 and --window, --chunk-tokens is 1 at least")
    if arguments.tokens is not None and arguments.tokens < 2:
        parser.error("--tokens: 2 at least, the first has none before it")
    if arguments.threads < 0:
        parser.error("--threads: 0 at least")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: its folder does not exist")
    try:
        run(arguments)
    except EventLMError as error:
        print(f"perplexity.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
