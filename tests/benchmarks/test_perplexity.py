"""The perplexity benchmark: it scores each token once, and a path that computes the same gets the same figures."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import perplexity
from benchmarks.perplexity import (
    REFERENCE,
    in_transformers,
    in_worker,
    measure,
    read_text,
    summary,
    windows,
    worker_way,
)
from eventlm.errors import UsageError
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


@pytest.mark.parametrize(("num_tokens", "length", "stride"), [(2, 8, 4), (8, 8, 4), (9, 8, 4), (100, 32, 7)])
def test_each_token_but_the_first_is_scored_once(num_tokens: int, length: int, stride: int) -> None:
    spans = list(windows(num_tokens, length, stride))
    assert [index for span in spans for index in range(span.first, span.end)] == list(range(1, num_tokens))
    for span in spans:
        assert span.end - span.start <= length
        assert span.first - span.start >= min(span.first, length - stride)


def test_the_text_is_the_one_that_figures_are_published_for(tmp_path: Path) -> None:
    assert len(read_text()) > 70_000
    other = tmp_path / "other.txt"
    other.write_text(read_text() + " ")
    with pytest.raises(UsageError, match="its SHA-256 is"):
        read_text(other)


def test_a_path_differs_from_the_reference_by_what_it_computes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    rng = random.Random(2)
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    rounded = {"cpu_kernels": "auto", "dtype": "bfloat16"}
    exact = {"cpu_kernels": "torch", "dtype": "float32"}
    ways = {
        REFERENCE: in_transformers(folder, "float32"),
        "exact": in_worker(folder, 64, 20, exact),
        "rounded": in_worker(folder, 64, 64, rounded),
        "nothing": lambda _, num_last: torch.zeros(num_last, VOCAB_SIZE),
    }
    figures = summary(measure(token_ids, ways, 64, 24))
    assert abs(figures["exact"]["change_percent"]) < 1e-3
    assert 0 <= figures["exact"]["max_kl_nats"] < 1e-5
    assert figures["exact"]["same_top_percent"] == 100
    assert 1e-2 < figures["rounded"]["logits_error_percent"] < 2
    assert figures["exact"]["mean_kl_nats"] < figures["rounded"]["mean_kl_nats"] < 1e-2
    assert figures["nothing"]["perplexity"] == pytest.approx(VOCAB_SIZE)
    assert figures["nothing"]["logits_error_percent"] == pytest.approx(100)


def test_one_more_path() -> None:
    assert worker_way("dtype=half,cpu_kernels=torch").worker == {"dtype": "float16", "cpu_kernels": "torch"}
    assert worker_way("kv_cache_dtype=fp8").worker == {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "say NAME=VALUE"),
        ("float16", "say NAME=VALUE"),
        ("dtype=float16,int8", "say NAME=VALUE"),
        ("dtpye=float16", "a NAME of dtype, quantization, kv_cache_dtype, cpu_kernels, model"),
        # What the benchmark says itself.
        ("block_size=32", "a NAME of dtype, quantization, kv_cache_dtype, cpu_kernels, model"),
        ("quantization=int3", "quantization='int3': must be one of none, int8, int4"),
        ("cpu_kernels=sse", "cpu_kernels='sse': must be one of auto, amx"),
    ],
)
def test_no_path(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        worker_way(text)
    assert str(raised.value).startswith(f"--also {text}: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--threads", "-1"], "--threads: 0 at least"),
        (["--json", "nowhere/figures.json"], "--json nowhere/figures.json: its folder does not exist"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    monkeypatch.setattr(perplexity, "run", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["perplexity.py", *flags])
    with pytest.raises(SystemExit) as ended:
        perplexity.main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
