"""Kept indices: found again, made anew where broken, bounded, and apart for other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import TraceCorruptError
from eventlm.replay.index import cache as caching
from eventlm.replay.index import open as opening
from eventlm.replay.index.cache import index_folder
from eventlm.replay.index.open import open_index
from tests.replay.index.runs import GOLDEN_RUNS, assert_same, refuse


def test_an_index_is_kept_and_found_again(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_index(GOLDEN_RUNS[0])
    (file,) = index_folder().iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(opening, "RunIndexer", refuse)
    kept = open_index(GOLDEN_RUNS[0])
    assert kept.facts == made.facts
    assert_same(made, kept)
    assert kept.core_at(kept.facts.next_s).digests() == made.core_at(made.facts.next_s).digests()


def test_a_broken_file_is_made_anew(own_cache: None) -> None:
    made = open_index(GOLDEN_RUNS[0])
    (file,) = index_folder().iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert_same(made, open_index(GOLDEN_RUNS[0]))


def test_the_least_recently_used_go_first(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    open_index(GOLDEN_RUNS[0])
    (first,) = index_folder().iterdir()
    monkeypatch.setattr(caching, "MAX_BYTES", first.stat().st_size + 10)
    open_index(GOLDEN_RUNS[1])
    (second,) = index_folder().iterdir()
    assert second != first


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "file"))
    assert len(open_index(GOLDEN_RUNS[0]).requests) > 0


def test_other_code_has_other_indices(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    open_index(GOLDEN_RUNS[0])
    monkeypatch.setattr(caching, "source_hash", lambda package, parts: "another version")
    open_index(GOLDEN_RUNS[0])
    assert len(list(index_folder().iterdir())) == 2


def test_a_trace_that_was_damaged_since_is_read_again(own_cache: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOLDEN_RUNS[0].read_bytes())
    open_index(path)
    content = path.read_bytes()
    place = content.index(b'"ts":', len(content) // 2) + 5
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(TraceCorruptError, match="is damaged at line"):
        open_index(path)
