"""The pages build as a site without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import REPOSITORY


def build(site: Path, *, config: Path = REPOSITORY / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    assert pages >= {path.stem for path in (REPOSITORY / "docs").glob("*.md")} - {"index"}
    assert (tmp_path / "site" / "pictures" / "event-log.svg").exists()
    assert not list((tmp_path / "site").rglob("*.py"))


def test_a_broken_link_would_be_a_warning(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[there](http-api.md#nowhere)\n")
    config = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "site", config=tmp_path / "mkdocs.yml")
    assert done.returncode == 1
    assert "http-api.md" in done.stderr
