"""The files for Prometheus and Grafana, written to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.errors import UsageError
from eventlm.monitoring.alerts import Thresholds
from eventlm.monitoring.files import monitoring_files, write_files
from tests.monitoring.prometheus import needs_prometheus, promtool


@needs_prometheus
def test_prometheus_takes_them(tmp_path: Path) -> None:
    paths = write_files(tmp_path / "new" / "folder", monitoring_files("llm-1", "[::1]:8000", Thresholds()))
    assert [path.name for path in paths] == ["prometheus.yml", "alerts.yml", "dashboard.json"]
    assert "rules found" in promtool("check", "config", str(paths[0]))
    assert '"[::1]:8000"' in paths[0].read_text()


def test_the_job_is_the_same_in_all(tmp_path: Path) -> None:
    files = monitoring_files("llm-1", "127.0.0.1:8000", Thresholds())
    assert 'job_name: "llm-1"' in files["prometheus.yml"]
    assert 'job="llm-1"' in files["alerts.yml"]
    (job,) = [each for each in json.loads(files["dashboard.json"])["templating"]["list"] if each["name"] == "job"]
    assert job["current"]["value"] == "llm-1"


def test_files_are_replaced_and_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": "1"})
    write_files(tmp_path, {"a": "2"})
    assert (tmp_path / "a").read_text() == "2"
    with pytest.raises(UsageError, match="-o DIR"):
        write_files(tmp_path / "a", {"b": ""})
