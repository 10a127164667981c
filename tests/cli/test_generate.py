"""`eventlm generate` as a process: what it prints, what it refuses, and that nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from eventlm.bootstrap.composition import compose
from eventlm.cli.config_flags import config_from_arguments
from eventlm.cli.generate import _requests, configure
from eventlm.cli.parser import Parser
from eventlm.events import Arrived, End, Finished
from eventlm.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.cli.conftest import RunHere
from tests.models.hub_server import make_cached
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until
from tests.serving import command, fake_text, run_command, verified


def generate(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_command("generate", *arguments, cwd=cwd, stdin=stdin)


def output_of(*arguments: str, cwd: Path, stdin: str = "") -> str:
    done = generate(*arguments, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_prompt_is_completed(tmp_path: Path) -> None:
    done = generate("--model", "fake", "--seed", "5", "--max-tokens", "48", "Hello", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, fake_text(5, 48) + "\n", "")


def test_several_prompts_are_printed_in_order_and_recorded(tmp_path: Path) -> None:
    arguments = ["--model", "fake", "--seed", "5", "--max-tokens", "9", "--record", "runs", "--max-num-seqs", "1"]
    done = generate(*arguments, "One", "-", "Three\nlines\nof text", cwd=tmp_path, stdin="Two " * 40)
    text = fake_text(5, 9)
    assert done.stdout.split("\n") == [
        "=== 1/3: One",
        text,
        "=== 2/3: " + ("Two " * 40)[:59] + "…",
        text,
        "=== 3/3: Three",
        text,
        "",
    ]
    trace = verified(tmp_path / "runs" / "latest" / "trace.jsonl")
    assert trace.result.clean_end
    assert [(event.group_size, event.scheduling.offline) for event in trace.of(Arrived)] == [(3, True)] * 3
    run = (tmp_path / "runs" / "latest").resolve().name
    assert done.stderr == f"eventlm: recorded to runs/{run}/trace.jsonl\n"


def test_more_prompts_than_the_queue_has_room_for(tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    arguments = ["--model", "fake", "--max-queue-len", "2", "--max-num-seqs", "2", "--max-tokens", "3"]
    assert output_of(*arguments, *prompts, cwd=tmp_path).count("===") == 12


def test_a_stop_string_ends_the_text_before_it(tmp_path: Path) -> None:
    whole = fake_text(5, 60)
    stop = whole[30:36]
    arguments = ["--model", "fake", "--seed", "5", "--max-tokens", "60", "--stop", "nowhere", "--stop", stop]
    assert output_of(*arguments, "Hello", cwd=tmp_path) == whole[: whole.index(stop)] + "\n"


def test_several_completions_with_their_logprobs(tmp_path: Path) -> None:
    arguments = ["--model", "fake", "--seed", "5", "--max-tokens", "3", "-n", "2"]
    lines = output_of(*arguments, "--logprobs", "1", "--prompt-logprobs", "0", "hi", cwd=tmp_path).splitlines()
    parts = [position for position, line in enumerate(lines) if line.startswith("===")]
    assert [lines[position] for position in parts] == ["=== 1/1 (1 of 2): hi", "=== 1/1 (2 of 2): hi"]
    for index, position in enumerate(parts):
        text, prompt_title, h, i, title, *tokens = lines[position + 1 : position + 9]
        assert text == fake_text(5, 3, index=index)
        assert prompt_title == "--- log-probabilities of the prompt: token, rank, most likely ones"
        assert ("'h'" in h, "'i'" in i) == (True, True)
        assert title == "--- log-probabilities of the completion: token, rank, most likely ones"
        assert [line.split("'")[1] for line in tokens] == list(text)
        assert all("-0.693 " in line for line in tokens)  # the most likely one of the fake worker


async def test_every_flag_reaches_the_request() -> None:
    parser = Parser()
    configure(parser)
    arguments = parser.parse_args([
        "hi", "--model", "fake", "--max-tokens", "9", "--min-tokens", "2", "-n", "3", "--seed", "7", "--ignore-eos",
        "--stop", "a", "--stop", "b", "--stop-token-ids", "1,2", "--include-stop-str-in-output", "--temperature", "0.5",
        "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--repetition-penalty", "1.2", "--presence-penalty", "-1",
        "--frequency-penalty", "0.5", "--logit-bias", "5=-100", "--logit-bias", "6=2.5", "--allowed-token-ids", "5,6",
        "--bad-word", "no", "--logprobs", "2", "--prompt-logprobs", "1", "--show-special-tokens",
    ])  # fmt: skip
    [request] = await _requests(compose(config_from_arguments(arguments)), arguments, ["hi"])
    assert request.sampling == SamplingParams(
        max_tokens=9, min_tokens=2, ignore_eos=True, eos_token_ids=(257,), stop_token_ids=(1, 2), temperature=0.5,
        top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=0.5,
        logit_bias={5: -100.0, 6: 2.5}, allowed_token_ids=(5, 6), bad_words_token_ids=(tuple(b"no"),), logprobs=2,
        prompt_logprobs=1, n=3, seed=7, stop=["a", "b"], bad_words=["no"], include_stop_str_in_output=True,
        skip_special_tokens=False,
    )  # fmt: skip
    assert (request.scheduling.skip_cache_read, request.scheduling.offline) == (True, True)


def test_a_checkpoint_by_its_folder_and_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_cached(tmp_path / "hub", {path.name: path.read_bytes() for path in folder.iterdir()})
    greedy = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--kv-memory", "8MiB"]
    # The text through the template by hand is the same prompt as with --chat.
    prompt = "The quick brown fox"
    by_hand = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    texts = output_of("--model", str(folder), *greedy, prompt, by_hand, cwd=tmp_path)
    plain, chat = re.split("^=== ./2: .*\n", texts, flags=re.MULTILINE)[1:]
    assert plain != chat
    assert output_of("--model", "acme/tiny", *greedy, "--chat", prompt, cwd=tmp_path) == chat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt given: eventlm generate PROMPT..., or - to read standard input"),
        (["-", "-"], "- is given twice"),
        (["hi", "--temperature", "3"], "error: --temperature: must be at most 2.0\n"),
        (["hi", "-n", "0"], "error: -n: must be at least 1\n"),
        (["hi", "--bad-word", ""], "error: --bad-word: it must not be empty\n"),
        (["hi", "--top-p", "0"], "error: --top-p: "),
        (["hi", "--max-tokens", "0"], "error: --max-tokens: must be at least 1\n"),
        (["hi", "--max-tokens", "9000"], "maximum context length is 8192 tokens"),
        (["hi", "--stop", ""], "error: --stop: "),
        (["x" * 9000], "maximum context length is 8192 tokens"),
        (["hi", "--min-tokens", "9", "--max-tokens", "8"], "--min-tokens: 9 is more than --max-tokens, which"),
        (["hi", "--logit-bias", "5"], "argument --logit-bias: expected ID=X such as 5=-100, got '5'"),
        (["hi", "--logit-bias", "1024=1"], "error: --logit-bias: token id 1024 is out of vocabulary, which has the"),
        (["hi", "--allowed-token-ids", "5;6"], "argument --allowed-token-ids: expected token ids with commas"),
        (["hi", "--logprobs", "21"], "error: --logprobs: must be at most 20\n"),
        (["hi", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
    ],
)
def test_mistakes_are_one_line(run_here: RunHere, arguments: list[str], message: str) -> None:
    code, out, err = run_here("generate", "--model", "fake", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("eventlm: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_input_that_is_not_utf8(tmp_path: Path) -> None:
    done = subprocess.run(
        command("generate", "--model", "fake", "-"),
        cwd=tmp_path,
        input=b"ab\xff",
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 2
    assert b"standard input is not valid UTF-8: invalid start byte at byte 2" in done.stderr


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("chat_template", "no_template"))
    done = generate("--model", str(folder), "--chat", "Hello", cwd=tmp_path)
    assert done.returncode == 2
    assert "this model has no chat template; leave --chat out" in done.stderr


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM, signal.SIGKILL]
)
def test_nothing_is_left_of_it(tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = ["--model", "fake", "--max-tokens", "8000", "--record", "runs", "--fake", "base_ns=20000000"]
    with subprocess.Popen(
        command("generate", *arguments, "Hello"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        [worker] = children(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not is_running(worker))
        assert process.stderr.read() == b""
    assert list(temporary.iterdir()) == []
    trace = verified(tmp_path / "runs" / "latest" / "trace.jsonl")
    if number != signal.SIGKILL:
        assert isinstance(trace.events[-1], End)
        assert [event.reason for event in trace.of(Finished)] == ["cancelled"]


def test_killed_while_its_worker_starts(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("generate", "--model", "fake", "Hello"), cwd=tmp_path, stdout=subprocess.PIPE
    ) as process:
        [worker] = wait_until(lambda: children(process.pid))
        process.kill()
    wait_until(lambda: not is_running(worker))


def test_a_reader_that_leaves_early(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(
            command("generate", "--model", "fake", "Hello"),
            cwd=tmp_path,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_SECONDS,
        )
    assert (done.returncode, done.stderr) == (141, b"")
