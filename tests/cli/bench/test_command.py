"""`eventlm bench` as a process: what it prints, writes and refuses, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.bench.load import Load
from eventlm.bench.records import LoadResult
from eventlm.cli.engine_command import StopSignals
from tests.cli.conftest import RunHere
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until
from tests.serving import Server, command

FAR_LAUNCHER = """
from eventlm.launchers.launcher import Launcher, LaunchError

class Far(Launcher, frozen=True, kw_only=True):
    async def start(self, system, setups, spawned=()):
        raise LaunchError("no cluster has answered")
"""
FAST = ("--no-ceiling", "--input-len", "16", "--output-len", "8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # So slow that no client is busy with it, of which it would warn.
    running = Server(tmp_path_factory.mktemp("server"), "--model", "fake", "--fake", "base_ns=20000000").wait_ready()
    yield running
    running.close()


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("bench", *arguments),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def lines_of(report: str) -> dict[str, str]:
    """The report's lines by their names, which end at two spaces."""
    pairs = (line.partition("  ") for line in report.splitlines() if "  " in line)
    return {name: value.strip() for name, _, value in pairs}


def test_serve(server: Server, tmp_path: Path) -> None:
    load = ("--request-rate", "200", "--num-prompts", "20", "--input-len", "16", "--output-len", "8")
    done = bench("serve", "--url", server.url, *load, "--slo", "e2e=60000", "--output", "results", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = lines_of(done.stdout)
    assert found["server"] == f"{server.url}, model fake, completions"
    assert found["requests"] == "20 sent, 20 succeeded"
    assert found["tokens"] == "320 prompt, 160 output"
    assert "(100.0% of the requests)" in found["goodput"]
    assert "can consume" in found["this client"]
    assert len(found["TTFT"].split()) == len(found["end to end"].split()) == 6
    results = tmp_path / "results"
    records = [json.loads(line) for line in (results / "requests.jsonl").read_text().splitlines()]
    assert sorted(record["index"] for record in records) == list(range(20))
    assert {record["output_tokens"] for record in records} == {8}
    statistics = json.loads((results / "summary.json").read_text())["statistics"]
    times = [record["ttft_ms"] for record in records]
    assert statistics["ttft_ms"]["mean"] == pytest.approx(sum(times) / 20)
    assert statistics["ttft_ms"]["max"] == max(times)
    as_json = bench("serve", "--url", server.url, *FAST, "--num-prompts", "2", "--json", cwd=tmp_path)
    assert json.loads(as_json.stdout)["statistics"]["num_success"] == 2
    again = bench("serve", "--url", server.url, *FAST, "--output", "results", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert "choose another folder" in again.stderr


def test_serve_a_chat_in_a_closed_loop(server: Server, tmp_path: Path) -> None:
    done = bench(
        "serve", "--url", f"{server.url}/v1", "--max-concurrency", "3", "--num-prompts", "9", "--endpoint", "chat",
        "--ignore-eos", "--warmup", "2", *FAST, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = lines_of(done.stdout)
    assert found["load"] == "closed loop: 3 requests at once; latency counts from the sending"
    assert found["requests"] == "9 sent, 9 succeeded"
    assert done.stderr == ""


def test_serve_reports_what_there_is_on_ctrl_c(server: Server, tmp_path: Path) -> None:
    record = server.trace
    before = record.read_bytes().count(b'"t":"finish"')
    process = start("serve", "--url", server.url, "--max-concurrency", "2", "--duration", "600", *FAST, cwd=tmp_path)
    wait_until(lambda: record.read_bytes().count(b'"t":"finish"') >= before + 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, err
    assert "interrupted" in lines_of(out)["requests"]
    assert err == "eventlm: warning: interrupted: the figures are of what had ended until then\n"


def test_serve_says_that_nothing_was_sent_before_a_signal(
    server: Server, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(load: Load, stop: asyncio.Event) -> LoadResult:
        return LoadResult([], duration_ns=0, cpu_ns=0, interrupted=True)

    monkeypatch.setattr(Load, "run", interrupted)
    monkeypatch.setattr(StopSignals, "exit_code", 130)
    found = run_here("bench", "serve", "--url", server.url, *FAST)
    assert found == (130, "", "eventlm: interrupted before anything was sent\n")


def test_serve_keeps_what_there_is_when_the_server_dies(tmp_path: Path) -> None:
    server = Server(tmp_path, "--model", "fake").wait_ready()
    try:
        load = ("--max-concurrency", "2", "--duration", "600", *FAST, "--output", "results")
        process = start("serve", "--url", server.url, *load, cwd=tmp_path)
        wait_until(lambda: server.trace.read_bytes().count(b'"t":"finish"') >= 8)
        server.stop(number=signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        server.close()
    assert process.returncode == 1, err
    assert "the server does not answer any more" in err
    records = (tmp_path / "results" / "requests.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["error"] is None for line in records) >= 4
    assert "connection" in lines_of(out)["requests"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--url", "http://127.0.0.1:1"], 1, "is the server running?"),
        (["serve", "--url", "ftp://h"], 2, "is not an address"),
        (["serve", "--request-rate", "0"], 2, "--request-rate: 0 is not above 0"),
        (["serve", "--request-rate", "-2"], 2, "--request-rate: -2 is not above 0"),
        (["serve", "--burstiness", "2"], 2, "need a --request-rate"),
        (["serve", "--max-concurrency", "0"], 2, "--max-concurrency: 0 is not a number of at least 1"),
        (["serve", "--duration", "5"], 2, "--duration needs"),
        (["serve", "--dataset", "none.txt"], 2, "none.txt: No such file"),
        (["serve", "--dataset", "empty.txt"], 2, "there is no prompt in this file"),
        (["serve", "--output", "/dev/null/x"], 2, "cannot be written"),
        (["serve", "--extra-body", "[]"], 2, "not a JSON object"),
        (["serve", "--slo", "ttft=x"], 2, "--slo"),
        (["serve", "--num-prefixes", "2"], 2, "needs a --prefix-len"),
        (["serve", "--requestrate", "2"], 2, "did you mean --request-rate?"),
        (["serve", "--inflight", "2", "--max-concurrency", "4"], 2, "leave one out"),
        (["serve", "--retry-backoff-ms", "5"], 2, "--retry-backoff-ms is for --retries"),
        (["serve", "--retries", "-1"], 2, "--retries: -1 is not a number of at least 0"),
        (["serve", "--post-kernel", "0"], 2, "--post-kernel: 0 is not a number of at least 1"),
        (["throughput", "--num-prompts", "0"], 2, "--num-prompts: 0 is not a number of at least 1"),
        (["throughput", "--model", "fake", "--input-len", "none"], 2, "--input-len 'none' is not a length"),
        (["latency", "--model", "fake", "--output-json", "x.json"], 2, "unknown flag --output-json"),
        ([], 2, "required: KIND"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], code: int, words: str, tmp_path: Path, run_here: RunHere) -> None:
    (tmp_path / "empty.txt").touch()
    found, out, err = run_here("bench", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert err.startswith("eventlm: error: ")
    assert err.count("\n") == 1


def test_ranks_that_were_not_told_of_each_other(monkeypatch: pytest.MonkeyPatch, run_here: RunHere) -> None:
    """Each one speaks: none knows that another will."""
    monkeypatch.setenv("PMI_SIZE", "3")
    line = "eventlm: error: 3 ranks were started, each with a load of its own: add --mpi\n"
    assert run_here("bench", "serve") == (2, "", line)


def test_a_kernel_behind_each_answer(server: Server, tmp_path: Path) -> None:
    """Where there is no GPU it says what runs in its place."""
    load = ("--url", server.url, "--inflight", "2", "--num-prompts", "3", "--post-kernel", "4", "--retries", "1")
    done = bench("serve", *load, *FAST, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = lines_of(done.stdout)
    assert found["load"].startswith("closed loop: 2 requests at once")
    assert found["retries"] == "none"
    assert "4 rounds behind each answer, on " in done.stdout
    assert len(done.stdout.splitlines()[-1].split()) == 7


def test_a_model_that_is_not_served(server: Server, tmp_path: Path) -> None:
    done = bench("serve", "--url", server.url, "--model", "other", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"eventlm: error: --model other is not served at {server.url}/v1; served: fake\n"


def test_throughput(tmp_path: Path) -> None:
    done = bench(
        "throughput", "--model", "fake", "--num-prompts", "6", "--input-len", "20", "--output-len", "5",
        "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["num_requests"], result["prompt_tokens"], result["output_tokens"]) == (6, 120, 30)
    assert result["output_tokens_per_second"] == pytest.approx(30 / result["elapsed_s"])


def test_a_workload_that_does_not_fit(tmp_path: Path) -> None:
    done = bench("throughput", "--model", "fake", "--max-model-len", "64", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "do not fit the context of 64 tokens" in done.stderr.splitlines()[-1]


def test_latency(tmp_path: Path) -> None:
    done = bench(
        "latency", "--model", "fake", "--batch-size", "2", "--input-len", "8", "--output-len", "4", "--num-iters", "3",
        "--num-iters-warmup", "1", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["latencies_s"]) == 3
    assert result["latency_s"]["mean"] == pytest.approx(sum(result["latencies_s"]) / 3)


def test_the_tables_of_throughput_and_latency(run_here: RunHere) -> None:
    size = ("--model", "fake", "--output-len", "4", "--input-len", "8")
    code, out, err = run_here("bench", "throughput", "--num-prompts", "2", *size)
    assert code == 0, err
    assert lines_of(out)["tokens"] == "16 prompt, 8 output"
    code, out, err = run_here("bench", "latency", "--batch-size", "2", "--num-iters", "2", *size)
    assert code == 0, err
    assert lines_of(out)["batch"] == "2 requests of 8 prompt and 4 output tokens"
    assert lines_of(out)["mean"].endswith(" s")


def test_step(run_here: RunHere) -> None:
    size = ("--batch", "1,3", "--context", "40", "--prefill", "64", "--steps", "4")
    code, out, err = run_here("bench", "step", "--model", "fake", *size)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert [row[-2:] for row in rows if row[:1] == ["step"]] == [["-", "-"]] * 3
    totals = out.splitlines()[-3:]
    assert [line.partition("  ")[0] for line in totals] == [
        "decode, batch 1, context 40", "decode, batch 3, context 40", "prefill 64",
    ]  # fmt: skip
    assert all(float(line.split()[-6]) > 0 for line in totals)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--batch", "1,x"), "--batch 1,x: give numbers with commas between them"),
        (("--batch", "0"), "--batch 0: 0 is not at least 1"),
        (("--steps", "0"), "--steps: 0 is not a number of at least 1"),
        (("--temperature", "nan"), "--temperature: nan is not a number of at least 0"),
        (("--replicas", "2"), "--replicas 2: the steps of one replica are measured"),
        (("--context", "9999"), "the context is 8,192"),
    ],
)
def test_step_refuses(run_here: RunHere, flags: tuple[str, ...], complaint: str) -> None:
    code, out, err = run_here("bench", "step", "--model", "fake", *flags)
    assert (code, out) == (2, "")
    assert complaint in err


def test_step_starts_what_is_elsewhere_before_it_measures(run_here: RunHere, tmp_path: Path) -> None:
    """Only there is it known how many threads a rank has."""
    (tmp_path / "far_away.py").write_text(FAR_LAUNCHER)
    code, out, err = run_here("bench", "step", "--model", "fake", "--launcher", "far_away:Far")
    assert (code, out) == (1, "")
    assert err == "eventlm: error: no cluster has answered\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_step_is_stopped_while_the_machine_is_measured(tmp_path: Path, number: int) -> None:
    """However long the process that measures would take."""
    process = start("step", "--model", "fake", cwd=tmp_path)
    [measuring] = wait_until(lambda: [pid for pid in children(process.pid) if "machine_probe" in command_line(pid)])
    os.kill(measuring, signal.SIGSTOP)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out, err) == (128 + number, "", "")
    assert not is_running(measuring)
