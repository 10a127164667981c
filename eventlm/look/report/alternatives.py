"""A what-if beside the run: each metric with its error bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eventlm.config import PluginSpec
from eventlm.replay.rebuild import Changes
from eventlm.replay.what_if.compare import Metric
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import OnStage, WhatIfResult, what_if
from eventlm.types import TimeWindow


def ask(
    path: str,
    policies: Sequence[PluginSpec],
    *,
    window: TimeWindow | None,
    trust_local_plugins: bool,
    on_progress: OnStage | None = None,
) -> dict[str, Any]:
    """What other policies would have done with the run's work, for the page. Raises as `what_if` does."""
    wanted = [
        Alternative(changes=Changes(policy=policy, trust_local_plugins=trust_local_plugins)) for policy in policies
    ]
    result = what_if(path, wanted, window=window, trust_local_plugins=trust_local_plugins, on_progress=on_progress)
    return as_object(result)


def as_object(result: WhatIfResult) -> dict[str, Any]:
    """The table of metrics, and what is known of its errors."""
    comparison = result.comparison
    return {
        "names": [each.name for each in result.alternatives],
        # Without deadlines there are no values of them.
        "metrics": [_row(each) for each in comparison.metrics if each.recorded is not None],
        "wonLost": [
            {"won": each.num_won, "lost": each.num_lost, "equal": each.num_equal, "censored": each.num_censored}
            for each in comparison.won_lost
        ],
        "numDraws": comparison.num_draws,
        "notes": [*result.notes, *(f"{each.name}: {note}" for each in result.alternatives for note in each.notes)],
    }


def _row(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "unit": metric.unit,
        "better": metric.better,
        "recorded": metric.recorded,
        "baseline": metric.baseline,
        "bar": metric.error_bar,
        "cells": [
            {
                "value": cell.value,
                "bar": cell.error_bar,
                "difference": cell.difference,
                "isSignificant": cell.is_significant,
            }
            for cell in metric.alternatives
        ],
    }
