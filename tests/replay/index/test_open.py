"""Opening an index: kept and found again, by several processes, from the log alone, of damaged and divergent runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import TraceCorruptError
from eventlm.replay.index.cache import index_folder
from eventlm.replay.index.open import open_index
from eventlm.replay.verify.divergence_error import DivergenceError
from tests.replay.index.runs import BROKEN_RUN, GOLDEN_RUNS
from tests.replay.traces import tampered


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: None) -> None:
    """A cache of each test's own."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "cache"))


def test_a_run_that_diverges_is_refused_unless_it_is_not_verified() -> None:
    with pytest.raises(DivergenceError, match=r"at event \d+ .* --no-verify reads the log alone, `eventlm replay"):
        open_index(BROKEN_RUN)
    assert len(open_index(BROKEN_RUN, verify=False).requests) > 0


def test_of_a_damaged_run_what_precedes_is_shown_if_asked(tmp_path: Path) -> None:
    lines = GOLDEN_RUNS[0].read_bytes().split(b"\n")
    lines[100] = lines[100].replace(b'"ts":', b'"ts": ')
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TraceCorruptError, match="line 101"):
        open_index(path)
    index = open_index(path, partial=True)
    assert index.facts.next_s == 100
    assert "line 101" in index.facts.damage
    assert index.core_at(100).next_seq >= 100
    assert not list(index_folder().glob("*.index"))


def test_a_local_plugin_that_is_not_trusted(tmp_path: Path) -> None:
    def rename(objects: list[dict[str, object]]) -> None:
        objects[0]["plugins"][0]["name"] = "mine:Policy"  # type: ignore[index]

    index = open_index(tampered(GOLDEN_RUNS[0], tmp_path / "local.jsonl", rename))
    assert not index.facts.is_verified
    assert "--trust-local-plugins" in index.facts.missing
