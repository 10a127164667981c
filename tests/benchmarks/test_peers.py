"""The benchmark beside peers, without a server: its loads, command lines, checks, medians, tables and ratios."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks import peers
from benchmarks.peer import checkpoints, openvino_server, servers
from benchmarks.peer.report import COLUMNS, Measurement, avx2_title, format_ratios, format_table, medians, ratios
from benchmarks.peer.servers import COMMANDS, Server, ServerError, Target, can_serve
from benchmarks.peer.setup import MENDS, SetupError, apply_mends, locate, run_step
from eventlm.cli.bench import serve as bench_serve
from eventlm.cli.parser import Parser
from eventlm.errors import PullError
from tests.checkpoints import VOCAB_SIZE, make_tokenizer


def measurement(server: str, num_clients: int, rate: float, *, number: int = 1, **changes: Any) -> Measurement:
    """One whose latencies are those of so many tokens a second."""
    index = ("smollm2", "bf16", server, num_clients, number)
    return Measurement(*index, rate, 1000 / rate, 2000 / rate, 500 / rate)._replace(**changes)


ROUNDS = [
    measurement("eventlm", 1, 20.0),
    measurement("eventlm", 1, 90.0, number=2),
    measurement("eventlm", 1, 24.0, number=3),
    measurement("openvino", 1, 20.0),
    measurement("openvino", 1, 20.0, number=2),
    measurement("openvino", 1, 99.0, number=3, wrong="one request failed"),
    measurement("llama.cpp", 1, 16.0),
    measurement("eventlm", 32, 100.0),
    measurement("openvino", 32, 100.0),
    measurement("llama.cpp", 32, 1.0, wrong="the server did not start"),
]


def test_medians_are_over_the_rounds_that_went_well() -> None:
    found = medians(ROUNDS)
    assert found["eventlm", 1]["tokens_per_second"] == 24.0
    assert found["openvino", 1]["tokens_per_second"] == 20.0
    assert ("llama.cpp", 32) not in found


def test_each_peer_that_went_well_is_compared_with() -> None:
    found = {(ratio.num_clients, ratio.peer, ratio.column.field): ratio for ratio in ratios(ROUNDS)}
    rate = found[1, "openvino", "tokens_per_second"]
    assert (rate.ratio, rate.target, rate.is_met) == (1.2, 1.15, True)
    assert found[1, "openvino", "ttft_p99_ms"].ratio == pytest.approx(1 / 1.2)
    assert found[1, "openvino", "ttft_p99_ms"].is_met
    assert found[1, "llama.cpp", "tokens_per_second"].ratio == 1.5
    assert not found[32, "openvino", "tokens_per_second"].is_met
    assert found[32, "openvino", "tpot_p50_ms"].is_met
    assert len(found) == 3 * len(COLUMNS)


def test_more_is_asked_of_files_that_both_serve_and_less_with_avx2() -> None:
    for precision, target in (("q4_0", 1.3), (avx2_title("q4_0"), 1.0)):
        found = ratios([one._replace(precision=precision) for one in ROUNDS])
        assert found[0].target == target, precision


def test_what_has_no_target_is_neither_met_nor_missed() -> None:
    int8 = [one._replace(precision="int8") for one in ROUNDS]
    assert {ratio.is_met for ratio in ratios(int8)} == {None}
    assert "MISSED" not in format_ratios(ratios(int8))
    assert "MISSED" in format_ratios(ratios(ROUNDS))


def test_a_ratio_stands_beside_what_is_asked_of_it() -> None:
    head, one, other, many = format_ratios(ratios(ROUNDS)).splitlines()
    assert one.startswith("1 client, openvino ")
    assert "1.20 >= 1.15 met" in one
    assert other.startswith("1 client, llama.cpp ")
    assert many.startswith("32 clients, openvino ")
    assert "1.00 >= 1.05 MISSED" in many
    assert {len(row) for row in (head, one, other, many)} == {len(head)}


def test_the_table_has_a_row_for_each_server_and_lines_up() -> None:
    title, _, clients, *rows = format_table(ROUNDS).splitlines()
    assert title == "smollm2, bf16, median of 3 rounds"
    assert clients.split() == ["clients", *["1", "32"] * len(COLUMNS)]
    assert [row.split()[0] for row in rows] == ["eventlm", "openvino", "llama.cpp"]
    assert {len(row) for row in (clients, *rows)} == {len(clients)}
    assert rows[2].split()[1:3] == ["16.0", "failed"]


def test_the_titles_of_a_single_load_do_not_run_together() -> None:
    _, titles, clients, *_ = format_table([measurement("eventlm", 8, 5.0)]).splitlines()
    assert [part.strip() for part in titles.split("  ") if part] == [column.title for column in COLUMNS]
    assert len(titles) == len(clients)


def test_nothing_is_compared_where_eventlm_or_every_peer_failed() -> None:
    assert ratios([measurement("eventlm", 1, 5.0)]) == []
    assert ratios([measurement("openvino", 1, 5.0)]) == []


def test_each_round_has_its_own_prompts_and_begins_with_another_server() -> None:
    loads = [peers.measured_load(clients, number) for number in (1, 2, 3) for clients in (1, 8, 32)]
    loads += [peers.warm_up_load(clients) for clients in (1, 8, 32)]
    assert len({load.seed for load in loads}) == len(loads)
    assert [peers.rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]


def test_the_load_is_one_that_bench_serve_takes() -> None:
    load = peers.measured_load(8, 1)
    command = peers.bench_command(load, "http://127.0.0.1:1", Path("/model"), Path("/output"))
    parser = Parser(prog="eventlm bench serve")
    bench_serve.configure(parser)
    options = bench_serve.serve_options(parser.parse_args(command[command.index("serve") + 1 :]))
    assert (options.max_concurrency, options.num_prompts, options.is_open_loop) == (8, 16, False)
    assert (str(options.input_lengths), str(options.output_lengths)) == ("128", "64")
    assert (options.ignore_eos, options.temperature, options.prefix_tokens) == (True, 0.0, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"num_success": 3, "errors": {"http 500": 1}}, "3 of 4 requests succeeded: {'http 500': 1}"),
        ({"output_tokens": 4 * 63}, "outputs of 63 tokens, not 64"),
        ({"prompt_tokens": 4 * 129}, "prompts of 129 tokens, not 128"),
    ],
)
def test_figures_of_another_load_do_not_count(changes: dict[str, Any], said: str) -> None:
    load = peers.measured_load(1, 1)
    statistics = {"num_success": 4, "errors": {}, "output_tokens": 4 * 64, "prompt_tokens": 4 * 128}
    assert peers.what_is_wrong(load, statistics | changes) == said


def test_peers_get_a_slot_for_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "checkpoint", lambda name, _: tmp_path / name)
    located = locate(tmp_path)
    target = Target("smollm2", "int8", 32, 8123, located)
    file = tmp_path / "models" / "smollm2" / "q8_0.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "models" / "smollm2" / "openvino-int8").mkdir()
    llama, openvino, eventlm = (COMMANDS[name](target) for name in ("llama.cpp", "openvino", "eventlm"))
    assert llama[llama.index("--parallel") + 1] == "32"
    assert llama[llama.index("--model") + 1] == str(file)
    assert openvino[0] == str(located.python)
    assert eventlm[-2:] == ["--quantization", "int8"]
    for command in (llama, openvino, eventlm):
        assert command[command.index("--port") + 1] == "8123"


def test_a_gguf_file_is_served_as_it_is_by_both_with_avx2_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "checkpoint", lambda name, _: tmp_path / name)
    located = locate(tmp_path)
    file = tmp_path / "models" / "smollm2" / "q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    for is_avx2 in (False, True):
        target = Target("smollm2", "q4_1", 8, 8123, located, is_avx2)
        llama, eventlm = COMMANDS["llama.cpp"](target), COMMANDS["eventlm"](target)
        assert str(file) in llama
        assert str(file) in eventlm
        assert "--quantization" not in eventlm
        assert (eventlm[-2:] == ["--cpu-kernels", "avx2"]) == is_avx2
        assert (llama[1] == f"LD_LIBRARY_PATH={located.llama_avx2_libraries}") == is_avx2


def test_servers_are_asked_only_for_what_they_have() -> None:
    def names(precision: checkpoints.Precision, *, is_avx2: bool = False) -> list[str]:
        return [name for name in COMMANDS if can_serve(name, precision, is_avx2=is_avx2)]

    assert names("bf16") == list(COMMANDS)
    assert names("int4") == ["eventlm", "openvino", "openvino-256"]
    assert names("q4_k_m") == ["eventlm", "llama.cpp"]
    assert names("bf16", is_avx2=True) == ["eventlm", "llama.cpp"]


def test_the_default_models_file_is_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("eventlm.models.fetch.pull.pull", lambda name: tmp_path)
    assert checkpoints.gguf_model("smollm2", "q4_1", tmp_path, locate(tmp_path)) == tmp_path / "model.gguf"


def test_types_of_fewer_bits_are_made_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def convert(_: str, command: list[Any], *args: object) -> None:
        commands.append([str(part) for part in command])
        file.with_name("bf16.partial" if "--outfile" in command else "q4_k_m.partial").touch()

    monkeypatch.setattr(checkpoints, "_convert", convert)
    located = locate(tmp_path)
    file = tmp_path / "models" / "smollm2" / "q4_k_m.gguf"
    assert checkpoints.gguf_model("smollm2", "q4_k_m", tmp_path, located) == file
    whole, quantise = commands
    assert whole[-4:-1] == ["--outtype", "bf16", "--outfile"]
    program = str(located.llama_program("llama-quantize"))
    assert quantise == [program, str(file.with_name("bf16.gguf")), str(file.with_suffix(".partial")), "q4_k_m"]


def test_openvino_has_a_thread_for_every_processor() -> None:
    """Of itself it leaves the second ones of cores idle."""
    for properties in openvino_server.PROPERTIES.values():
        assert properties["INFERENCE_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
        assert properties["ENABLE_HYPER_THREADING"] == "YES"


def test_a_line_that_is_mended_must_be_there(tmp_path: Path) -> None:
    for mend in MENDS:
        source = tmp_path / mend.file
        source.parent.mkdir(parents=True)
        source.write_text(f"before\n{mend.wrong}\nbehind\n")
    apply_mends(tmp_path)
    assert [(tmp_path / mend.file).read_text() for mend in MENDS] == [
        f"before\n{mend.right}\nbehind\n" for mend in MENDS
    ]
    with pytest.raises(SetupError, match=r"mmq.cpp has no line `_tile_loadconfig\(&tc\);` to mend"):
        apply_mends(tmp_path)


def test_progress_is_none_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(tmp_path / "default")
    monkeypatch.setattr("eventlm.models.fetch.pull.cached", lambda _: tmp_path / "default")
    monkeypatch.setattr(checkpoints, "save_random_qwen", lambda _: None)
    folder = checkpoints.checkpoint("qwen3-0.6b", locate(tmp_path))
    assert (folder / "tokenizer.json").is_file()
    printed = capsys.readouterr()
    assert (printed.out, "make random weights" in printed.err) == ("", True)


def test_a_larger_vocabulary_leaves_texts_as_they_were(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    make_tokenizer(small)
    large.mkdir()
    checkpoints._pad_tokenizer(small, large, VOCAB_SIZE + 100)
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (small, large))
    text = "The quick brown fox, pad400 and ünicode."
    assert after.encode(text).ids == before.encode(text).ids
    assert after.get_vocab_size() == VOCAB_SIZE + 100
    assert after.decode([VOCAB_SIZE + 99]) == f" pad{VOCAB_SIZE + 99}"


def test_a_failed_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "print('about to fail'); raise SystemExit(3)"]
    with pytest.raises(SetupError, match=r"convert: exit code 3:\n +about to fail"):
        run_step("convert", program, tmp_path / "log", timeout_s=60)


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = [sys.executable, "-c", "print('no such model'); raise SystemExit(5)"]
    monkeypatch.setitem(COMMANDS, "broken", lambda _: program)
    with pytest.raises(ServerError, match=r"exit code 5:\n +no such model"):
        Server("broken", Target("smollm2", "bf16", 1, 1, locate(tmp_path)), tmp_path)


def test_a_server_that_is_not_there_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that could not be compiled: the others go on."""
    monkeypatch.setitem(COMMANDS, "missing", lambda _: [str(tmp_path / "llama-server"), "--port", "1"])
    with pytest.raises(ServerError, match="llama-server cannot be started: No such file or directory"):
        Server("missing", Target("smollm2", "bf16", 1, 1, locate(tmp_path)), tmp_path)


def test_without_the_default_model_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> bool:
        raise PullError("smollm2 cannot be fetched")

    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    monkeypatch.setattr(peers, "prepare", fail)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["peers.py", "--output", str(tmp_path / "peers.json")])
    assert peers.main() == 1
    assert capsys.readouterr().err == "peers.py: smollm2 cannot be fetched\n"


def test_a_file_that_cannot_be_written_is_found_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "--output", "nowhere/peers.json"])
    with pytest.raises(SystemExit):
        peers.parse_arguments()
    assert "--output nowhere/peers.json: its folder does not exist" in capsys.readouterr().err


def test_every_round_is_in_the_file_and_failures_are_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Group:
        def __init__(self, target: Target, *_: object) -> None:
            self.place = target.model, target.precision

        def run(self) -> list[Measurement]:
            return [one._replace(model=self.place[0], precision=self.place[1]) for one in ROUNDS]

    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    monkeypatch.setattr(peers, "Group", Group)
    monkeypatch.setattr(peers, "prepare", lambda *_: True)
    output = tmp_path / "peers.json"
    monkeypatch.setattr(sys, "argv", ["peers.py", "--models", "smollm2", "--output", str(output)])
    assert peers.main() == 1
    lines = json.loads(output.read_text())["measurements"]
    assert len(lines) == 2 * len(ROUNDS)
    assert {line["precision"] for line in lines} == {"bf16", "int8"}
    printed = capsys.readouterr().out
    assert "smollm2, bf16, median of 3 rounds" in printed
    assert "smollm2, int8, median of 3 rounds" in printed


def test_the_load_is_that_before_the_servers_are_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Group:
        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> list[Measurement]:
            return [measurement("eventlm", 1, 5.0)]

    def prepare(*_: object) -> bool:
        monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 8.0, 8.0))
        return True

    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(peers, "Group", Group)
    monkeypatch.setattr(peers, "prepare", prepare)
    output = tmp_path / "peers.json"
    monkeypatch.setattr(sys, "argv", ["peers.py", "--models", "smollm2", "--output", str(output)])
    assert peers.main() == 0
    assert json.loads(output.read_text())["host"]["load_before"] == 0.1
    assert "not idle" not in capsys.readouterr().err
    assert peers.main() == 0
    assert json.loads(output.read_text())["host"]["load_before"] == 8.0
    assert "the machine is not idle (load 8.0): these figures are not to be trusted" in capsys.readouterr().err
