"""The token log of a run keeps in step with its trace and never lags its facts, after a crash or on a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import closed_segments
from eventlm.bus.token_log import OutputTokens, PromptTokens, decode_line, encode_line
from eventlm.events import Arrived, End, Event, Gap, Snapshot, StepCompleted
from eventlm.events.codec import encode_body
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.clock import SystemClock
from eventlm.system.system import real_system
from tests.bus import traces
from tests.bus.crashes import Killed, die_at
from tests.bus.token_logs import facts_without_tokens
from tests.replay.traces import read_objects

KEY = b"k" * 32


class Run:
    """Writes arrivals and completions with their tokens, and starts segments as an engine core does."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.writer = LogWriter(real_system(), folder, "run", digest_key=KEY, **options)
        self.num_events = 0
        self.write(self._header())

    def _header(self) -> Event:
        return traces.header(run="run", level="tokens", s=self.num_events, previous_h=self.writer.previous_h)

    def _stamp(self, event: Event) -> bytes:
        self.num_events += 1
        return encode_body(event)

    def write(self, *events: Event) -> None:
        """One drain."""
        for event in events:
            if isinstance(event, Arrived):
                prompt = PromptTokens(s=event.s, token_ids=[1, 2, event.s], params=SamplingParams(temperature=0.3))
                self.writer.append_tokens([encode_line(prompt)])
            elif isinstance(event, StepCompleted):
                self.writer.append_tokens([encode_line(OutputTokens(s=event.s, tokens=[[event.s], []]))])
            self.writer.append(self._stamp(event))
        self.writer.flush()

    def facts(self, num_facts: int = 4) -> None:
        """One drain of some arrivals and completions."""
        step = {"replica": 0, "epoch": 1, "step": 1, "start_ns": 0, "end_ns": 1}
        self.write(
            *(
                Arrived(s=s, prompt_tokens=3, max_tokens=1, scheduling=SchedulingParams(model="m"))
                if s % 2
                else StepCompleted(s=s, produced=[1, 0], **step)
                for s in range(self.num_events, self.num_events + num_facts)
            )
        )

    def turn(self) -> bool:
        """Start a segment, with a gap if there is one."""
        writer, missing = self.writer, (self.writer.next_s, self.num_events - 1)

        def lines() -> Iterator[bytes]:
            yield self._stamp(self._header())
            if problem:
                yield self._stamp(Gap(s=self.num_events, first=missing[0], last=missing[1], reason=problem))
            yield self._stamp(Snapshot(s=self.num_events, state=Raw(b"{}")))

        problem = writer.problem
        return writer.start_segment(self.num_events, lines())

    def end(self) -> Path:
        """Close the log cleanly; the run's folder."""
        self.write(End(s=self.num_events))
        self.writer.close()
        return self.writer.run_folder


def test_every_file_of_a_run_has_a_token_log_with_the_tokens_of_its_facts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.facts()
    assert run.turn()
    run.facts()
    folder = run.end()
    assert facts_without_tokens(folder) == []
    assert sorted(os.listdir(folder)) == [
        *("tokens-000000000000.jsonl", "tokens.jsonl"),
        *("trace-000000000000.jsonl", "trace.jsonl"),
    ]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    first, second = (read_objects(folder / name) for name in ("tokens-000000000000.jsonl", "tokens.jsonl"))
    assert first[0] == {"t": "tokens", "s": 0, "format": 1, "run": "run", "digest_key": KEY.hex()}
    assert first[1] == {"t": "prompt", "s": 1, "token_ids": [1, 2, 1], "params": {"temperature": 0.3}}
    assert first[2] == {"t": "outputs", "s": 2, "tokens": [[2], []]}
    # The chain goes on.
    last_h = (folder / "tokens-000000000000.jsonl").read_bytes()[-19:-3].decode()
    assert (second[0]["s"], second[0]["previous_h"]) == (5, last_h)
    assert [item["s"] for item in second[1:]] == [7, 8, 9, 10]


def test_lines_come_back_as_they_were() -> None:
    params = SamplingParams(
        temperature=0.1, top_p=0.95, logit_bias={5: -1.5}, bad_words_token_ids=((1, 2),), logprobs=3, max_tokens=7
    )
    for line in (
        PromptTokens(s=3, token_ids=[0, 127_999], params=params, cache_salt="ab"),
        OutputTokens(s=4, tokens=[[], [1, 2]]),
    ):
        assert decode_line(encode_line(line)) == line


def test_a_run_without_a_line_leaves_nothing(tmp_path: Path) -> None:
    LogWriter(real_system(), tmp_path, "run", digest_key=KEY).close()
    assert os.listdir(tmp_path) == []


def test_a_trace_without_tokens_has_no_token_log(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run") as writer:
        writer.append(encode_body(traces.header()))
    assert os.listdir(tmp_path / "run") == ["trace.jsonl"]


def test_its_bytes_count_for_the_length_of_a_segment(tmp_path: Path) -> None:
    run = Run(tmp_path, segment_bytes=8000)
    line = encode_line(OutputTokens(s=1, tokens=[[7] * 4000]))
    assert not run.writer.segment_due
    run.writer.append_tokens([line])
    run.facts(1)
    assert run.writer.segment_due


def test_old_token_logs_go_with_their_segments(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_bytes=3000)
    for _ in range(6):
        run.facts(12)
        assert run.turn()
        folder = run.writer.run_folder
        closed = [segment.path.name for segment in closed_segments(folder)]
        assert sorted(path.name for path in folder.glob("tokens-*")) == [
            name.replace("trace", "tokens") for name in closed
        ]
        assert sum(path.stat().st_size for path in folder.iterdir()) < 6000
    assert "trace-000000000000.jsonl" not in closed
    assert facts_without_tokens(run.end()) == []


def test_an_old_run_goes_with_all_its_files(tmp_path: Path) -> None:
    old = tmp_path / "20250101-000000-abcdef"
    with LogWriter(real_system(), tmp_path, old.name, digest_key=KEY) as writer:
        writer.append(encode_body(traces.header()))
    # Of a writer that died between naming this and naming its trace.
    (old / "tokens-000000000009.jsonl").write_text("")
    (old / "tokens.jsonl.next").write_text("")
    with LogWriter(real_system(), tmp_path, "20250102-000000-abcdef", keep_bytes=1, keep_all_runs=True):
        assert not old.exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_process_that_dies_leaves_no_fact_without_its_tokens(tmp_path: Path, *, has_links: bool) -> None:
    for fail_at in range(100):
        run = Run(tmp_path / str(fail_at))
        run.facts()
        with pytest.MonkeyPatch.context() as patch:
            if not has_links:
                patch.setattr(os, "link", _refuse)
            calls = die_at(patch, fail_at)
            try:
                run.facts()
                run.turn()
                run.facts()
                is_done = True
            except Killed:
                is_done = False
        assert facts_without_tokens(run.writer.run_folder) == [], calls
        if is_done:
            assert fail_at > 15
            break
    else:
        pytest.fail("it never came to its end")


def _refuse(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("refused", ["link", "rename"])
def test_where_a_segment_cannot_begin_the_last_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Whichever of the steps fails; a file without links is renamed, so there two refusals are needed."""
    for fail_at in range(4):
        run = Run(tmp_path / str(fail_at))
        run.facts()
        clock = [1000.0]
        monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _, clock=clock: int(clock[0] * 1e9))
        with pytest.MonkeyPatch.context() as patch:
            _refuse_at(patch, "rename", fail_at)
            if refused == "link":
                patch.setattr(os, "link", _refuse)
            is_begun = run.turn()
        if not is_begun:
            clock[0] += 1000
            assert run.turn()
        run.facts()
        folder = run.end()
        assert facts_without_tokens(folder) == []
        assert not list(folder.glob("*.next"))


def _refuse_at(patch: pytest.MonkeyPatch, name: str, fail_at: int) -> None:
    real, num_calls = getattr(os, name), 0

    def call(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return _refuse() if num_calls == fail_at + 1 else real(*arguments)

    patch.setattr(os, name, call)


def test_what_a_full_disk_does_not_take_is_a_gap_and_no_fact_lacks_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, room = [1000.0], [1 << 40]
    write = os.write

    def limited(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _: int(clock[0] * 1e9))
    for left in range(0, 1600, 97):
        run = Run(tmp_path / str(left))
        run.facts()
        room[0] = left
        run.facts(8)
        if not run.writer.problem:
            assert left > 1000
            break
        run.facts(3)
        room[0] = 1 << 40
        clock[0] += 100
        assert run.turn()
        run.facts()
        folder = run.end()
        assert facts_without_tokens(folder) == []
        with LogReader(folder) as reader:
            assert [line.s for line in reader][-1] == run.num_events - 1
            assert reader.num_missing > 0
