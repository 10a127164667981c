"""Reading a token log in step with its trace: one bad line costs itself, and nothing is taken from a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.token_log import OutputTokens, PromptTokens, TokenLogStart, encode_line
from eventlm.bus.token_log_reader import TokenLogReader, open_token_log
from eventlm.errors import TraceCorruptError, TraceVersionError, UsageError
from eventlm.events import Arrived, Header, StepCompleted
from eventlm.events.codec import chain, close_line
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from tests.bus import traces

START = TokenLogStart(s=0, format=1, run="run", digest_key="0a0b")
LINES = [
    START,
    PromptTokens(s=2, token_ids=[5, 6], params=SamplingParams()),
    OutputTokens(s=5, tokens=[[7]]),
    OutputTokens(s=9, tokens=[[8], []]),
    PromptTokens(s=11, token_ids=[1], params=SamplingParams()),
    OutputTokens(s=14, tokens=[[9]]),
]


def header(**changes: object) -> Header:
    return traces.header(run="run", level="tokens", **changes)


@pytest.fixture
def lines() -> list[bytes]:
    h, closed = "", []
    for line in LINES:
        body = encode_line(line)
        h = chain(h, body)
        closed.append(close_line(body, h))
    return closed


def write(folder: Path, lines: list[bytes], name: str = "tokens.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def found_for(trace: Path, header: Header) -> Path:
    with open_token_log(trace, header) as reader:
        return Path(reader.path)


def arrived(s: int, num_tokens: int) -> Arrived:
    return Arrived(s=s, prompt_tokens=num_tokens, max_tokens=1, scheduling=SchedulingParams(model="m"))


def done(s: int, *produced: int) -> StepCompleted:
    return StepCompleted(s=s, replica=0, epoch=1, step=1, start_ns=0, end_ns=1, produced=list(produced))


def found(path: Path) -> dict[int, object]:
    """What is found for each fact by its `s`, and the damage."""
    facts = [arrived(2, 2), done(3), done(5, 1), done(9, 1, 0), arrived(11, 1), done(14, 1), done(15, 1)]
    with TokenLogReader(path) as reader:
        lines = [reader.prompt(fact) if isinstance(fact, Arrived) else reader.outputs(fact) for fact in facts]
        return {line.s: line for line in lines if line is not None} | {-1: reader.damage}


def test_every_fact_gets_its_line(tmp_path: Path, lines: list[bytes]) -> None:
    path = write(tmp_path, lines)
    assert found(path) == {line.s: line for line in LINES[1:]} | {-1: []}
    with TokenLogReader(path) as reader:
        assert reader.digest_key == b"\x0a\x0b"
        # Lines of facts that the trace does not have are passed over, and a line is of one kind and of its lengths.
        assert reader.outputs(done(9, 1)) is None
        assert reader.outputs(done(9, 1, 0)) == LINES[3]
        assert reader.outputs(done(11, 1)) is None
        assert reader.prompt(arrived(11, 2)) is None
        assert reader.prompt(arrived(11, 1)) == LINES[4]


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5])
def test_a_bad_line_costs_itself(tmp_path: Path, lines: list[bytes], place: int) -> None:
    offset = sum(map(len, lines[:place]))
    lines[place] = lines[place].replace(b"[", b"[ ", 1)
    path = write(tmp_path, lines)
    expected = {line.s: line for line in LINES[1:] if line is not LINES[place]}
    assert found(path) == expected | {-1: [f"{path} is damaged at line {place + 1}, byte {offset}"]}


def test_the_line_after_a_lost_one_or_one_without_a_hash_cannot_be_trusted(tmp_path: Path, lines: list[bytes]) -> None:
    expected = {line.s: line for line in LINES[1:] if line.s not in (5, 9)}
    path = write(tmp_path, [*lines[:2], *lines[3:]])
    assert found(path) == expected | {-1: [f"{path} is damaged at line 3, byte {sum(map(len, lines[:2]))}"]}
    path = write(tmp_path, [*lines[:2], b"nothing\n", *lines[3:]])
    assert {s for s in found(path) if s >= 0} == expected.keys()


def test_a_torn_tail_is_no_damage(tmp_path: Path, lines: list[bytes]) -> None:
    path = write(tmp_path, [*lines[:-1], lines[-1][:-9]])
    assert found(path) == {line.s: line for line in LINES[1:-1]} | {-1: []}


def test_the_file_that_begins_with_the_segment_is_the_one(tmp_path: Path, lines: list[bytes]) -> None:
    trace = tmp_path / "copy-of-the-trace.jsonl"
    trace.touch()
    path = write(tmp_path, lines)
    assert found_for(trace, header()) == path
    # A writer has died between naming the token log and naming the trace: the present one is of a later segment.
    older = path.rename(tmp_path / "tokens-000000000000.jsonl")
    body = encode_line(TokenLogStart(s=20, format=1, run="run", digest_key="0a0b", previous_h="0" * 16))
    write(tmp_path, [close_line(body, chain("0" * 16, body))])
    assert found_for(trace, header()) == older
    assert found_for(trace, header(s=20)) == path
    # Whatever has become of the one does not hide the other.
    whole = path.read_bytes()
    path.write_bytes(b"nonsense\n")
    assert found_for(trace, header()) == older
    with pytest.raises(TraceCorruptError, match="is not the first line of a token log"):
        found_for(trace, header(s=20))
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="was removed while it was read"):
        found_for(tmp_path / "pruned.jsonl", header(s=7))
    for other in (header(s=7), traces.header(run="other", level="tokens")):
        with pytest.raises(UsageError, match="is missing"):
            found_for(trace, other)
    with pytest.raises(UsageError, match="record with --record-tokens"):
        found_for(trace, traces.header(run="run"))


def test_what_is_no_token_log_is_refused(tmp_path: Path, lines: list[bytes]) -> None:
    for content in (b"", b"hello\n", b"\xff" * 40 + b"\n", traces.lines([traces.header()])[0]):
        write(tmp_path, [content])
        with pytest.raises(TraceCorruptError, match="is not the first line of a token log"):
            found_for(tmp_path / "trace.jsonl", header())
    path = write(tmp_path, [lines[0].replace(b"0a0b", b"0a0c"), *lines[1:]])
    with pytest.raises(TraceCorruptError, match="the hash of its first line does not match"):
        TokenLogReader(path)
    body = encode_line(TokenLogStart(s=0, format=2, run="run", digest_key=""))
    path = write(tmp_path, [close_line(body, chain("", body))])
    with pytest.raises(TraceVersionError, match="has format 2; this eventlm reads 1"):
        TokenLogReader(path)
    body = encode_line(TokenLogStart(s=0, format=1, run="run", digest_key="key"))
    path = write(tmp_path, [close_line(body, chain("", body))])
    with pytest.raises(TraceCorruptError, match="its key is not hexadecimal"):
        TokenLogReader(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot read the token log"):
        found_for(tmp_path / "trace.jsonl", header())
