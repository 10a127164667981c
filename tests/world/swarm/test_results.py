"""The totals of many seeds, and the page that shows them."""

from __future__ import annotations

from pathlib import Path

from tests.world.swarm.results import PAGE, Batch, Totals, add_batch, read_batches, shown


def test_batches_are_summed_up_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text(PAGE.read_text())
    for number in range(2):
        groups = {
            "seeds": {"seeds": 500, "simulated seconds": 3600},
            "faults set": {"freeze engine": 300},
            "faults": {"freeze engine": 200},
        }
        add_batch(Batch("abc", f"{number * 500}-{number * 500 + 499}", "", groups), page)
    text = page.read_text()
    assert "| seeds | 1,000 |" in text
    assert "| simulated hours | 2.0 |" in text
    assert "| freeze engine | 600 | 400 |" in text
    assert text.split("## Bugs")[1] == PAGE.read_text().split("## Bugs")[1]
    assert [batch.seeds for batch in read_batches(page)][-2:] == ["0-499", "500-999"]


def test_the_page_shows_the_sums_of_all_batches() -> None:
    totals = Totals()
    for batch in read_batches():
        totals.join(batch.groups)
    assert not totals.groups["seeds"] or shown(totals) in PAGE.read_text()
