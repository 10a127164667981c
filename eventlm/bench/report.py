"""The report of a load test, as text and as files."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf
from pathlib import Path
from typing import Any

import msgspec

from eventlm.bench.ceiling import SAFE_SHARE
from eventlm.bench.records import RequestRecord
from eventlm.bench.serve_bench import ServeOptions, ServeResult
from eventlm.bench.statistics import SampleDistribution, Statistics
from eventlm.errors import UsageError
from eventlm.formatting import counted, tally
from eventlm.table import aligned, table

REQUESTS_FILE = "requests.jsonl"
SUMMARY_FILE = "summary.json"
PLOT_FILE = "plot.png"
#: Own use of a core above which the client's times are its own as much as the server's.
_BUSY_SHARE = 0.8


def check_output(folder: Path) -> None:
    """Make the folder for the results. Raises UsageError if it cannot be written, or holds others' results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{SUMMARY_FILE}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be written: {error.strerror or error}") from error
    if (folder / SUMMARY_FILE).exists():
        raise UsageError(f"--output {folder}: there is a {SUMMARY_FILE} already; choose another folder")


def write_output(folder: Path, result: ServeResult, statistics: Statistics) -> None:
    """Write per-request lines, the summary and the picture. Raises UsageError if that fails."""
    from eventlm.bench.plot import plot_load

    try:
        with (folder / REQUESTS_FILE).open("wb") as file:
            for record in result.load.records:
                file.write(msgspec.json.encode(_request_line(record)) + b"\n")
        (folder / SUMMARY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(as_object(result, statistics))))
        plot_load(folder / PLOT_FILE, result, statistics)
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be written: {error.strerror or error}") from error


def _request_line(record: RequestRecord) -> dict[str, Any]:
    """A request's line, without prompt and output."""
    is_success = record.is_success
    return {
        "index": record.index,
        "intended_ns": record.intended_ns,
        "sent_ns": record.sent_ns,
        "first_token_ns": record.token_times_ns[0] if record.token_times_ns else None,
        "end_ns": record.end_ns,
        "rank": record.rank,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "ttft_ms": record.ttft_ns / 1e6 if is_success else None,
        "tpot_ms": record.tpot_ns / 1e6 if is_success and record.tpot_ns is not None else None,
        "e2e_ms": record.e2e_ns / 1e6 if is_success else None,
        "inter_token_ms": [gap_ns / 1e6 for gap_ns in record.inter_token_ns],
        "finish_reason": record.finish_reason or None,
        "error": record.error or None,
        "message": record.message or None,
        "retried": record.retried,
        "post_kernel_ms": record.post_kernel_ns / 1e6 if record.post_kernel_ns is not None else None,
    }


def as_object(result: ServeResult, statistics: Statistics) -> dict[str, Any]:
    """The summary: options but the API key, the load, and the statistics."""
    options = {name: value for name, value in msgspec.structs.asdict(result.options).items() if name != "api_key"}
    options |= {
        "input_lengths": str(result.options.input_lengths),
        "output_lengths": str(result.options.output_lengths),
        "request_rate": None if isinf(result.options.request_rate) else result.options.request_rate,
    }
    return {
        "model": result.model,
        "endpoint": result.endpoint,
        "options": options,
        "num_ranks": result.num_ranks,
        "interrupted": result.load.interrupted,
        "server_gone": result.load.server_gone or None,
        "ceiling_tokens_per_second": result.ceiling_tokens_per_second,
        "post_kernel_place": result.post_kernel_place or None,
        "statistics": msgspec.to_builtins(statistics),
    }


def format_report(result: ServeResult, statistics: Statistics) -> str:
    """The load test as aligned lines."""
    s = statistics
    lines = [
        ("server", f"{result.options.url}, model {result.model}, {result.endpoint}"),
        ("load", _load_in_words(result.options)),
        *([("ranks", f"{result.num_ranks}, under MPI")] if result.num_ranks > 1 else []),
        ("requests", tally({"sent": s.num_requests, "succeeded": s.num_success} | s.errors)),
        *([("retries", _retries_in_words(s.retries))] if result.options.retries else []),
        ("duration", f"{s.duration_s:.2f} s"),
        ("tokens", f"{s.prompt_tokens:,} prompt, {s.output_tokens:,} output"),
        ("requests/s", f"{s.requests_per_second:.2f}{_rates_in_words(result.options, s)}"),
        ("output tokens/s", f"{s.output_tokens_per_second:,.1f}"),
        ("total tokens/s", f"{s.total_tokens_per_second:,.1f}"),
    ]
    if s.goodput is not None:
        limits = ", ".join(
            f"{name} {limit:g} ms" for name, limit in msgspec.to_builtins(s.goodput.objectives_ms).items()
        )
        share = f"{s.goodput.share:.1%} of the requests"
        lines.append(("goodput", f"{s.goodput.requests_per_second:.2f} requests/s ({share}) within {limits}"))
    lines.append(("concurrency", f"mean {s.mean_concurrency:.1f}, peak {s.peak_concurrency}"))
    if s.late_ms is not None and result.options.is_open_loop:
        late = f"p50 {s.late_ms.p50:.2f} ms, p99 {s.late_ms.p99:.2f} ms, max {s.late_ms.max:.2f} ms"
        lines.append(("sent late by", f"{late} (within the latencies below)"))
    if result.options.post_kernel:
        rounds = counted(result.options.post_kernel, "round")
        num_dropped = s.num_success - s.num_post_kernels
        dropped = f"; {num_dropped:,} still waited at the end and were dropped" if num_dropped else ""
        lines.append(("post-kernel", f"{rounds} behind each answer, on {result.post_kernel_place}{dropped}"))
    lines.append(("this client", _client_in_words(result, s)))
    return "\n".join([*aligned(lines), "", *_latency_table(s)])


def warnings(result: ServeResult, statistics: Statistics) -> list[str]:
    """Warnings about the report."""
    found = []
    load, records = result.load, result.load.records
    if load.interrupted:
        found.append("interrupted: the figures are of what had ended until then")
    if load.server_gone:
        found.append(f"the server does not answer any more, the rest was not sent: {load.server_gone}")
    failure = next((record.message for record in records if record.message), "")
    if failure and not load.server_gone:
        found.append(f"the first failure: {failure}")
    if result.ceiling_tokens_per_second is not None:
        share = statistics.output_tokens_per_second / result.ceiling_tokens_per_second
        if share > SAFE_SHARE:
            found.append(f"this is {share:.0%} of what this client can consume: it may be the client that was measured")
    if statistics.cpu_share > _BUSY_SHARE:
        found.append(
            f"this client used {statistics.cpu_share:.0%} of a core: latencies may be its own; share the load among "
            "several ranks: mpiexec -n 4 eventlm bench serve --mpi"
        )
    num_uncounted = sum(record.is_success and not record.counted_by_server for record in records)
    if num_uncounted:
        found.append(
            f"the server sent no usage for {counted(num_uncounted, 'request')}: their output tokens are its events"
        )
    return found


def _load_in_words(options: ServeOptions) -> str:
    limit = f", at most {options.max_concurrency} at once" if options.max_concurrency else ""
    intended = f"{limit}; latency counts from the intended time of sending"
    if options.trace:
        return f"open loop: the times of {options.trace}{intended}"
    if not options.is_open_loop:
        return f"closed loop: {counted(options.max_concurrency, 'request')} at once; latency counts from the sending"
    if isinf(options.request_rate):
        return f"open loop: everything at once{intended}"
    shape = f" (burstiness {options.burstiness:g})" if options.arrivals == "gamma" else ""
    return f"open loop: {options.arrivals}{shape} arrivals, {options.request_rate:g} requests/s{intended}"


def _rates_in_words(options: ServeOptions, statistics: Statistics) -> str:
    if not options.is_open_loop or statistics.drawn_rate is None or statistics.sent_rate is None:
        return ""
    return f" completed; offered {statistics.drawn_rate:.2f}, sent {statistics.sent_rate:.2f}"


def _retries_in_words(retries: dict[str, int]) -> str:
    after = ", ".join(f"{number:,} after {kind}" for kind, number in retries.items())
    return f"{sum(retries.values()):,}: {after}" if retries else "none"


def _client_in_words(result: ServeResult, statistics: Statistics) -> str:
    busiest = f" in the busiest of {result.num_ranks} ranks" if result.num_ranks > 1 else ""
    cpu = f"{statistics.cpu_share:.0%} of a core{busiest}"
    ceiling = result.ceiling_tokens_per_second
    if ceiling is None:
        return f"{cpu}; its ceiling was not measured"
    share = statistics.output_tokens_per_second / ceiling
    shown = f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
    return f"{cpu}; can consume {ceiling:,.0f} tokens/s ({shown} used)"


def _latency_table(statistics: Statistics) -> Iterator[str]:
    columns = SampleDistribution.__struct_fields__
    rows = []
    for name, found in (
        ("TTFT", statistics.ttft_ms),
        ("TPOT", statistics.tpot_ms),
        ("inter-token", statistics.inter_token_ms),
        ("end to end", statistics.e2e_ms),
        *([("post-kernel", statistics.post_kernel_ms)] if statistics.post_kernel_ms else []),
    ):
        rows.append([name, *(f"{getattr(found, column):,.2f}" if found else "-" for column in columns)])
    return table(["latency (ms)", *columns], rows)
