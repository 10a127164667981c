"""A run on a GPU, or in Triton's interpreter where there is none: recorded, verified and executed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm import LLM, SamplingParams, StructuredOutputsParams
from eventlm.cli.main import main
from eventlm.errors import UsageError
from eventlm.worker.gpu.device import IS_INTERPRETED
from tests.checkpoints import make_checkpoint

PROMPTS = ["Hello world, who are you? I am a log of events.", "The quick brown", "I spy"]
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=5, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=3, seed=4, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="[a-z]+")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), head_dim=32, num_layers=1)


def tokens(folder: Path, *, count: int = 3, **options: Any) -> list[list[int]]:
    """What the first so many prompts give; the third one has a grammar."""
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 32, "max_model_len": 128, "max_num_seqs": 4}
    with LLM(str(folder), **settings, **options) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:count], PARAMS[:count], use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What a processor gives."""
    return tokens(folder, device="cpu")


def test_a_run_gives_what_a_processor_gives_and_can_be_proven(
    folder: Path, expected: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert tokens(folder, count=2, device="cuda", record=str(runs), record_tokens=True) == expected[:2]
    trace = runs / "latest/trace.jsonl"
    text = trace.read_text()
    gpu = "Triton's interpreter" if IS_INTERPRETED else torch.cuda.get_device_name()
    assert f'"gpu":"{gpu}"' in text
    assert '"bucket":2' in text
    capsys.readouterr()
    assert main(["replay", str(trace)]) == 0
    assert main(["replay", str(trace), "--execute"]) == 0
    assert "9 tokens in" in (said := capsys.readouterr().out)
    assert "identical" in said


@pytest.mark.skipif(not IS_INTERPRETED, reason="there is a GPU, whose memory is measured")
def test_the_cache_of_no_gpu_cannot_be_sized_by_a_run(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no GPU memory to measure for the KV cache; .* with num_blocks or kv_memory"):
        LLM(str(folder), device="cuda")


@pytest.mark.filterwarnings("ignore:ranks on GPUs are a preview", "ignore:one thread of each of 2 ranks")
def test_ranks_give_the_same_and_their_run_can_be_verified(
    folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    layout = {"tensor_parallel_size": 2, "ranks_per_gpu": 2}
    assert tokens(folder, device="cuda", record=str(runs), record_tokens=True, **layout) == expected
    assert main(["replay", str(runs / "latest/trace.jsonl")]) == 0
