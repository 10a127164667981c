"""The hash of sources: it is of Python files by their names and contents."""

from __future__ import annotations

from pathlib import Path

from eventlm.system.source_hash import source_hash


def test_it_changes_with_names_and_contents(tmp_path: Path) -> None:
    parts = ("core", "rebuild.py")
    found = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("notes.txt", "3")):
        package = tmp_path / str(len(list(tmp_path.iterdir())))
        (package / "core" / "deep").mkdir(parents=True)
        (package / "core" / "deep" / name).write_text(content)
        (package / "rebuild.py").write_text("x")
        (package / "unrelated.py").write_text(name)
        found.add(source_hash(package, parts))
    assert len(found) == 4
    assert source_hash(tmp_path / "0", parts) == source_hash(tmp_path / "0", parts)
