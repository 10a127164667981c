"""What a worker tells of its start."""

from __future__ import annotations

from eventlm.worker.start_report import READING_WEIGHTS, StartReport


def test_a_phase_is_reported_when_it_begins_and_once_for_each_percent() -> None:
    told: list[tuple[str, int, int]] = []
    report = StartReport(lambda *words: told.append(words))
    report.begin(READING_WEIGHTS)
    for done in range(1, 1001):
        report.progress(done, 1000)
    assert told == [(READING_WEIGHTS, done, 1000 if done else 0) for done in range(0, 1001, 10)]
    told.clear()
    report.begin("another")
    for done in (1, 2, 3):
        report.progress(done, 3)
    assert told == [("another", 0, 0), ("another", 1, 3), ("another", 2, 3), ("another", 3, 3)]


def test_it_works_without_a_listener() -> None:
    report = StartReport()
    report.begin(READING_WEIGHTS)
    report.progress(1, 2)
