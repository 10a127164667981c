"""`--cost-model` of simulate, sweep and what-if."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventlm.replay.cost.model import LinearCost
    from eventlm.replay.cost.roofline import RooflineCost


def read_cost_model(text: str) -> LinearCost | RooflineCost:
    """What `--cost-model` names; `latest` is the newest run. Raises UsageError, and what LogReader raises."""
    from eventlm.cli.progress import file_progress
    from eventlm.cli.trace_path import trace_file
    from eventlm.replay.cost.files import load_cost_model

    path = trace_file(text)
    with file_progress("fitting a cost model", path) as on_progress:
        return load_cost_model(path, on_progress=on_progress)
