"""Workload files for tests that start other processes."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from eventlm.replay.workload.file import FORMAT_VERSION, WorkloadHeader, write_workload
from eventlm.replay.workload.request_line import WorkloadLine


def write_made_workload(path: Path, *, num_requests: int = 40, prompt_tokens: int = 60, gap_ms: int = 20) -> str:
    """Requests that come `gap_ms` apart, with lengths that differ."""
    lines = [
        WorkloadLine(
            arrival_s=Decimal(gap_ms * index) / 1000,
            prompt_tokens=prompt_tokens * (1 + index % 5),
            output_tokens=5 + index % 7,
        )
        for index in range(num_requests)
    ]
    write_workload(path, WorkloadHeader(format=FORMAT_VERSION, source="made"), lines)
    return str(path)
