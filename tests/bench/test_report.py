"""The report as text and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.bench.draws import parse_lengths
from eventlm.bench.records import LoadResult
from eventlm.bench.report import check_output, format_report, warnings, write_output
from eventlm.bench.serve_bench import ServeOptions, ServeResult
from eventlm.bench.statistics import summarize
from eventlm.config.objectives import Objectives
from eventlm.errors import UsageError
from tests.bench.records import MS, record, result


def options(**fields: Any) -> ServeOptions:
    length = parse_lengths("10", "--input-len")
    return ServeOptions(url="http://h:1", input_lengths=length, output_lengths=length, **fields)


def load() -> LoadResult:
    return result(
        record(0, intended=0, tokens=[100, 150, 200]),
        record(1, intended=100, sent=101, tokens=[300, 400, 500]),
        record(2, intended=200, tokens=[], end=210, error="http 429", message="full", output_tokens=0),
        duration=500,
        cpu_ns=5 * MS,
    )


def serve_result(
    load_result: LoadResult | None = None, *, ceiling: float | None = 10_000.0, **fields: Any
) -> ServeResult:
    ranks = fields.pop("num_ranks", 1)
    place = fields.pop("post_kernel_place", "")
    made = options(**fields)
    return ServeResult(made, "m", "completions", ceiling, load_result or load(), ranks, place)


def report(found: ServeResult) -> str:
    return format_report(found, summarize(found.load, found.options.objectives))


def test_report() -> None:
    found = serve_result(request_rate=10.0, arrivals="gamma", burstiness=0.5, objectives=Objectives(ttft=150))
    assert report(found).splitlines() == [
        "server           http://h:1, model m, completions",
        "load             open loop: gamma (burstiness 0.5) arrivals, 10 requests/s; latency counts from the intended "
        "time of sending",
        "requests         3 sent, 2 succeeded, 1 http 429",
        "duration         0.50 s",
        "tokens           20 prompt, 6 output",
        "requests/s       4.00 completed; offered 10.00, sent 10.00",
        "output tokens/s  12.0",
        "total tokens/s   52.0",
        "goodput          2.00 requests/s (33.3% of the requests) within ttft 150 ms",
        "concurrency      mean 1.2, peak 2",
        "sent late by     p50 0.00 ms, p99 0.98 ms, max 1.00 ms (within the latencies below)",
        "this client      1% of a core; can consume 10,000 tokens/s (0.12% used)",
        "",
        "latency (ms)    mean     p50     p90     p95     p99     max",
        "TTFT          150.00  150.00  190.00  195.00  199.00  200.00",
        "TPOT           75.00   75.00   95.00   97.50   99.50  100.00",
        "inter-token    75.00   75.00  100.00  100.00  100.00  100.00",
        "end to end    300.00  300.00  380.00  390.00  398.00  400.00",
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_concurrency": 4}, "closed loop: 4 requests at once; latency counts from the sending"),
        ({}, "open loop: everything at once; latency counts from the intended"),
        ({"trace": "t.csv"}, "open loop: the times of t.csv; latency"),
        ({"request_rate": 2.5, "max_concurrency": 3}, "poisson arrivals, 2.5 requests/s, at most 3 at once; latency"),
    ],
)
def test_the_load_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in report(serve_result(**fields))


def test_nothing_succeeded() -> None:
    found = serve_result(result(record(0, intended=0, tokens=[], end=1, error="timeout", message="t")), ceiling=None)
    text = report(found)
    assert "1 sent, 0 succeeded, 1 timeout" in text
    assert "its ceiling was not measured" in text
    assert text.splitlines()[-1].split() == ["end", "to", "end", *"------"]


def test_of_several_ranks_with_retries_and_a_kernel() -> None:
    found = serve_result(
        result(
            record(0, intended=0, tokens=[100], retried=["http 429", "http 500"], post_kernel_ns=2 * MS),
            record(1, intended=0, tokens=[100], rank=3, post_kernel_ns=4 * MS),
            record(2, intended=0, tokens=[], end=1, retried=["http 429"], error="http 429"),
            record(3, intended=0, tokens=[100]),
            cpu_ns=500 * MS,
        ),
        num_ranks=4, retries=2, post_kernel=1000, post_kernel_place="a GPU",
    )  # fmt: skip
    lines = report(found).splitlines()
    assert "ranks            4, under MPI" in lines
    assert "requests         4 sent, 3 succeeded, 1 http 429" in lines
    assert "retries          3: 2 after http 429, 1 after http 500" in lines
    dropped = "1 still waited at the end and were dropped"
    assert f"post-kernel      1,000 rounds behind each answer, on a GPU; {dropped}" in lines
    assert "this client      50% of a core in the busiest of 4 ranks" in "\n".join(lines)
    assert lines[-1].split()[:3] == ["post-kernel", "3.00", "3.00"]
    assert "retries          none" in report(serve_result(retries=1))
    assert not {"ranks", "retries", "post-kernel"} & {
        line.split(" ")[0] for line in report(serve_result()).splitlines()
    }


def warned(found: ServeResult) -> str:
    return "\n".join(warnings(found, summarize(found.load)))


def test_warnings() -> None:
    assert warned(serve_result(result(record(0, intended=0, tokens=[1])))) == ""
    assert "the first failure: full" in warned(serve_result())
    assert "this is 60% of what this client can consume" in warned(serve_result(ceiling=20.0))
    assert "can consume" not in warned(serve_result(ceiling=25.0))
    assert "used 90% of a core" in warned(serve_result(msgspec.structs.replace(load(), cpu_ns=450 * MS)))
    assert "interrupted" in warned(serve_result(msgspec.structs.replace(load(), interrupted=True)))
    gone = warned(serve_result(msgspec.structs.replace(load(), server_gone="refused")))
    assert "the rest was not sent: refused" in gone
    uncounted = result(record(0, intended=0, tokens=[1], counted_by_server=False))
    assert "no usage for 1 request" in warned(serve_result(uncounted))


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    check_output(folder)
    found = serve_result(api_key="secret", objectives=Objectives(ttft=150))
    write_output(folder, found, summarize(found.load, found.options.objectives))
    assert sorted(path.name for path in folder.iterdir()) == ["plot.png", "requests.jsonl", "summary.json"]
    assert "secret" not in (folder / "summary.json").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["statistics"]["num_success"] == 2
    assert summary["statistics"]["ttft_ms"]["p50"] == 150.0
    assert summary["statistics"]["goodput"]["objectives_ms"] == {"ttft": 150.0}
    assert summary["options"]["request_rate"] is None
    assert summary["ceiling_tokens_per_second"] == 10_000.0
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "index": 1, "intended_ns": 100 * MS, "sent_ns": 101 * MS, "first_token_ns": 300 * MS, "end_ns": 500 * MS,
        "rank": 0, "prompt_tokens": 10, "output_tokens": 3, "ttft_ms": 200.0, "tpot_ms": 100.0, "e2e_ms": 400.0,
        "inter_token_ms": [100.0, 100.0], "finish_reason": "length", "error": None, "message": None,
        "retried": [], "post_kernel_ms": None,
    }  # fmt: skip
    assert (lines[2]["error"], lines[2]["message"], lines[2]["ttft_ms"]) == ("http 429", "full", None)


def test_an_output_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        check_output(tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be written"):
        check_output(tmp_path / "file" / "below")
    (tmp_path / "summary.json").touch()
    with pytest.raises(UsageError, match=r"there is a summary\.json already"):
        check_output(tmp_path)
