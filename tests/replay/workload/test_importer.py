"""Public traces: samples made in each format, with what real files hold in store, and files that are not what they
should be. Beside each sample stands what must come of it."""

from __future__ import annotations

import gzip
import os
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.errors import UsageError
from eventlm.replay.workload.file import read_workload
from eventlm.replay.workload.import_formats import SourceName
from eventlm.replay.workload.importer import ImportSummary, import_trace
from eventlm.replay.workload.request_line import WorkloadLine
from eventlm.replay.workload.workload import resize_blocks

SAMPLES = Path(__file__).parent.with_name("samples")


def imported(source: SourceName, path: Path, output: Path, **part: Any) -> tuple[ImportSummary, list[WorkloadLine]]:
    found = import_trace(path, output, source=source, **part)
    header, *lines = output.read_bytes().splitlines()
    assert msgspec.json.decode(header)["source"] == source
    return found, [msgspec.json.decode(line, type=WorkloadLine) for line in lines]


def sample(name: str, output: Path, **part: Any) -> tuple[ImportSummary, list[WorkloadLine]]:
    source: Any = name.partition(".")[0].partition("_")[0]
    return imported(source, SAMPLES / name, output / "w.jsonl", **part)


def times(lines: list[WorkloadLine]) -> list[str]:
    return [f"{line.arrival_s:.9f}".rstrip("0") for line in lines]


def test_azure_over_midnight_with_seven_digits_and_no_last_newline(tmp_path: Path) -> None:
    assert not (SAMPLES / "azure.csv").read_bytes().endswith(b"\n")
    found, lines = sample("azure.csv", tmp_path)
    assert times(lines) == ["0.", "1.2499999", "1.2500001", "86402.75"]
    assert [(line.prompt_tokens, line.output_tokens) for line in lines] == [(120, 30), (4000, 1), (17, 256), (900, 75)]
    assert found.left_out == {"without output (failed)": 1}
    assert found.span_ns == 86_402_750_000_000
    assert (found.sessions_from, found.num_sessions, found.num_turns) == ("", 0, 0)
    assert (found.block_size, found.num_blocks) == (0, 0)


def test_azure_with_zones(tmp_path: Path) -> None:
    _, lines = sample("azure_2024.csv", tmp_path)
    assert times(lines) == ["0.", "1.007405", "2.49007"]


def test_burstgpt_follows_sessions_as_far_as_answers_had_ended(tmp_path: Path) -> None:
    found, lines = sample("burstgpt.csv", tmp_path)
    assert times(lines) == ["0.", "7.25", "8.", "8.", "55.", "113."]
    # The third came while the second was being answered, 4.5 s after the first was; the last after all of them.
    assert [line.parent for line in lines] == [-1, 0, 0, -1, -1, 2]
    assert [line.think_s for line in lines] == [None, Decimal("3.75"), Decimal("4.5"), None, None, Decimal(96)]
    assert [line.session for line in lines] == [1, 1, 1, 0, 0, 1]
    assert lines[3].service_class == "API log"
    assert found.left_out == {"without output (failed)": 1}
    assert (found.num_sessions, found.num_turns) == (1, 3)


def test_burstgpt_without_its_second_and_third_column(tmp_path: Path) -> None:
    found, lines = sample("burstgpt_old.csv", tmp_path)
    assert [(line.prompt_tokens, line.output_tokens) for line in lines] == [(472, 18), (1087, 230), (1360, 77)]
    assert times(lines) == ["0.", "40.", "113."]
    assert found.left_out == {"without output (failed)": 1}
    assert found.sessions_from == ""


def test_mooncake_keeps_blocks_and_infers_turns(tmp_path: Path) -> None:
    found, lines = sample("mooncake.jsonl", tmp_path)
    assert times(lines) == ["0.", "0.", "1.", "90.5", "90.50025", "200.", "200.", "300."]
    # Of two that begin alike the one whose answer would not fit in the prompt is no parent.
    assert [line.parent for line in lines] == [-1, -1, -1, 0, 3, 0, 3, -1]
    assert [line.session for line in lines] == [1, 0, 0, 1, 1, 1, 1, 0]
    assert [line.think_s for line in lines] == [None] * 8
    assert found.block_size == 512
    assert (found.num_blocks, found.num_distinct_blocks) == (27, 13)
    assert "inferred" in found.sessions_from
    assert lines[0].blocks == [0, 1, 2]
    # 1,100 tokens are 68 full blocks of 16, of which the last 4 lie in the partial one.
    names = resize_blocks(lines[0].blocks, from_size=512, to_size=16, num_tokens=lines[0].prompt_tokens)
    assert len(names) == 68
    longer = resize_blocks(lines[3].blocks, from_size=512, to_size=16, num_tokens=lines[3].prompt_tokens)
    assert names[:64] == longer[:64]
    assert names[64] != longer[64]


def test_short_turns_that_fill_no_block_follow_each_other(tmp_path: Path) -> None:
    """All hold the one full block; the fourth goes on from where the third did. The sixth goes on from none, so the
    block is a beginning that they share, and the last is not taken for a turn either."""
    path = tmp_path / "t.jsonl"
    lengths = [(520, 10), (560, 20), (590, 9), (590, 9), (605, 1), (525, 1), (700, 1)]
    path.write_text(
        "".join(
            f'{{"timestamp":{index},"input_length":{prompt},"output_length":{output},"hash_ids":[0,{index + 1}]}}\n'
            for index, (prompt, output) in enumerate(lengths)
        )
    )
    found, lines = imported("mooncake", path, tmp_path / "w.jsonl")
    assert [line.parent for line in lines] == [-1, 0, 1, 1, 3, -1, -1]
    assert (found.num_sessions, found.num_turns) == (1, 4)


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = gzip.compress((SAMPLES / "vidur.csv").read_bytes())
    writer = threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True)
    writer.start()
    found, _ = imported("vidur", pipe, tmp_path / "w.jsonl")
    writer.join()
    assert found.num_requests == 3


def test_bailian_names_its_parents(tmp_path: Path) -> None:
    found, lines = sample("bailian.jsonl", tmp_path)
    assert times(lines) == ["0.", "0.137", "14.286", "18.886", "38.086"]
    assert [line.parent for line in lines] == [-1, -1, 0, -1, 2]
    assert [line.session for line in lines] == [1, 0, 1, 0, 1]
    assert [line.service_class for line in lines] == ["text", "search", "text", "image", "text"]
    assert found.block_size == 16
    assert found.sessions_from == "named by the trace"
    assert (found.num_sessions, found.num_turns) == (1, 2)


def test_vidur_unsorted_and_exact(tmp_path: Path) -> None:
    found, lines = sample("vidur.csv", tmp_path)
    assert times(lines) == ["0.", "0.1", "0.3"]
    assert [line.prompt_tokens for line in lines] == [1024, 7, 512]
    assert found.num_sorted == 1


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir()))
def test_what_is_written_can_be_read_and_gzip_makes_no_difference(name: str, tmp_path: Path) -> None:
    _, lines = sample(name, tmp_path)
    workload = read_workload(tmp_path / "w.jsonl")
    assert [request.arrival.prompt_tokens for request in workload.requests] == [line.prompt_tokens for line in lines]
    assert [request.parent for request in workload.requests] == [line.parent for line in lines]
    compressed = tmp_path / f"{name}.gz"
    compressed.write_bytes(gzip.compress((SAMPLES / name).read_bytes()))
    source: Any = name.partition(".")[0].partition("_")[0]
    assert imported(source, compressed, tmp_path / "again.jsonl")[1] == lines


def test_a_part_of_it(tmp_path: Path) -> None:
    found, lines = sample("burstgpt.csv", tmp_path, start_ns=7 * 10**9, duration_ns=60 * 10**9)
    assert times(lines) == ["0.", "0.75", "0.75", "47.75"]
    assert [line.parent for line in lines] == [-1, -1, -1, -1]
    assert found.left_out["outside the requested part"] == 2


def test_more_than_a_workload_can_span(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n5e7,1,1\n")
    with pytest.raises(UsageError, match=r"spans 578.7 days, a workload 463.0 at most: .*--start and --duration"):
        imported("vidur", path, tmp_path / "w")
    assert not (tmp_path / "w").exists()
    _, lines = imported("vidur", path, tmp_path / "w", duration_ns=10**9)
    assert len(lines) == 1


AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("azure", b"", "has the columns none, a trace of azure needs TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("azure", AZURE, "holds no request"),
        ("azure", b"\n" + AZURE, "holds no request"),
        ("azure", AZURE[:-1] + b",contexttokens\n", ":1: 2 columns are called ContextTokens"),
        ("mooncake", b'{"timestamp":' + b"[" * 10_000, ":1: maximum recursion depth"),
        ("azure", b"a,b\n1,2\n", "has the columns a, b, a trace of azure needs TIMESTAMP"),
        ("azure", (SAMPLES / "vidur.csv").read_bytes(), "they are those of vidur: --from vidur"),
        ("mooncake", (SAMPLES / "bailian.jsonl").read_bytes(), "they are those of bailian: --from bailian"),
        ("mooncake", (SAMPLES / "azure.csv").read_bytes(), "they are those of azure: --from azure"),
        ("bailian", (SAMPLES / "mooncake.jsonl").read_bytes(), "they are those of mooncake: --from mooncake"),
        ("azure", AZURE + b"2023-11-16 18:15:46,1,2\nyesterday,1,2\n", r":3: TIMESTAMP: 'yesterday' is not a time"),
        ("azure", AZURE + b"2023-13-16 18:15:46,1,2\n", ":2: TIMESTAMP: '2023-13-16 18:15:46' is not a time: month"),
        ("azure", AZURE + b"2023-11-16 18:15:46,many,2\n", ":2: ContextTokens: 'many' is not a number"),
        ("azure", AZURE + b"2023-11-16 18:15:46,1.5,2\n", ":2: ContextTokens: '1.5' is not a whole number"),
        ("azure", AZURE + b"2023-11-16 18:15:46,-1,2\n", ":2: ContextTokens: -1 is out of range"),
        ("azure", AZURE + b"2023-11-16 18:15:46,nan,2\n", ":2: ContextTokens: .*(number|range)"),
        ("azure", AZURE + b"2023-11-16 18:15:46,1" + b"0" * 40 + b",2\n", ":2: ContextTokens: 10+ is out of range"),
        ("azure", AZURE + b"2023-11-16 18:15:46,1\n", ":2: 2 values for 3 columns"),
        ("azure", AZURE + b"2023-11-16 18:15:46,0,2\n", "is left: 1 without a prompt"),
        ("azure", b"\xff\xfe\x00", "is not text: byte 0xff is not UTF-8"),
        ("azure", b"\x1f\x8b\x08garbage that is no gzip", "is (damaged|cut short)"),
        ("mooncake", b'{"timestamp":0,"input_length":5,', r":1: Input data was truncated"),
        (
            "mooncake",
            b'{"timestamp":0,"input_length":5,"output_length":-5,"hash_ids":[]}\n',
            r":1: Expected `int` >= 0 - at `\$.output_length`",
        ),
        (
            "mooncake",
            b'{"timestamp":"soon","input_length":5,"output_length":5,"hash_ids":[]}\n',
            r":1: .*`\$.timestamp`",
        ),
    ],
)
def test_what_it_is_not(source: SourceName, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        import_trace(path, tmp_path / "w", source=source)
    assert [item.name for item in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl"])
def test_a_gzip_that_is_cut_short(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    first, second, *_ = (SAMPLES / name).read_bytes().splitlines()
    # Hard to compress, so that the cut lies between lines and within them.
    numbers = b"".join(second.replace(b"0", b"%d" % (number % 9), 1) + b"\n" for number in range(3000))
    content = gzip.compress(first + b"\n" + numbers)
    source: Any = name.partition(".")[0]
    for num_bytes in (len(content) - 9, len(content) // 2, 11):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(UsageError, match="is cut short: its compressed data ends before its end mark"):
            import_trace(path, tmp_path / "w", source=source)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    path = SAMPLES / "vidur.csv"
    with pytest.raises(UsageError, match=r"cannot read .*none: No such file"):
        import_trace(tmp_path / "none", tmp_path / "w", source="vidur")
    with pytest.raises(UsageError, match="Is a directory"):
        import_trace(tmp_path, tmp_path / "w", source="vidur")
    with pytest.raises(UsageError, match="it is a folder"):
        import_trace(path, tmp_path, source="vidur")
    copy = tmp_path / "copy.csv"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(UsageError, match="would replace what is read"):
        import_trace(copy, copy, source="vidur")
    assert copy.read_bytes() == path.read_bytes()
