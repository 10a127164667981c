"""`--response-store FILE`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import RunHere


def test_a_store_that_cannot_be_used_is_refused_before_a_model_is_looked_for(run_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database " * 100)
    (tmp_path / "notes.txt").chmod(0o600)
    for file, reason in [
        ("none/store", "there is no folder none; make it or give another file"),
        (
            "notes.txt",
            "it is damaged or not a database (file is not a database); move it away or give another file",
        ),
    ]:
        code, _, errors = run_here("serve", "missing", "--port", "0", "--response-store", file)
        assert code == 2
        assert errors.splitlines()[-1].endswith(f"cannot keep responses in {file}: {reason}")
