"""The files that `eventlm monitoring` writes."""

from __future__ import annotations

import json
from pathlib import Path

from eventlm.errors import UsageError
from eventlm.monitoring.alerts import Thresholds, alert_rules, rules_file
from eventlm.monitoring.dashboard import dashboard_file

SCRAPE_FILE, RULES_FILE, DASHBOARD_FILE = "prometheus.yml", "alerts.yml", "dashboard.json"


def monitoring_files(job: str, target: str, thresholds: Thresholds) -> dict[str, str]:
    """Names and texts. target: address and port of a server, for Prometheus to scrape."""
    return {
        SCRAPE_FILE: _scrape_file(job, target),
        RULES_FILE: rules_file(alert_rules(job, thresholds)),
        DASHBOARD_FILE: dashboard_file(job),
    }


def write_files(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write them to a folder, which is made, in place of those that it has. Raises UsageError."""
    paths = [folder / name for name in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; give another folder with -o DIR") from error
    return paths


def _scrape_file(job: str, target: str) -> str:
    return f"""\
# A configuration of Prometheus that scrapes one server and reads {RULES_FILE} beside it.
global:
  scrape_interval: 5s
  evaluation_interval: 15s
rule_files: [{RULES_FILE}]
scrape_configs:
  - job_name: {json.dumps(job)}
    static_configs:
      - targets: [{json.dumps(target)}]
"""
