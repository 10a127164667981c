"""The log: JSON lines for programs, text for people, and nothing of what a client sent."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eventlm.events import Arrived
from tests.processes import wait_until
from tests.serving import Server, verified

CODE = """
import logging, structlog, sys
from eventlm.cli.logging_setup import configure_logging
from eventlm.config import LogConfig
configure_logging(LogConfig(**eval(sys.argv[1])))
log = structlog.get_logger("eventlm.test")
log.debug("unseen")
structlog.contextvars.bind_contextvars(request_id="req-7")
log.info("seen", number=3, path="/a\\x1b[2Jb\\x9b")
structlog.contextvars.clear_contextvars()
logging.getLogger("library").warning("of %s", "a library")
def fail():
    local = "canary"
    try:
        {}["canary"]
    except KeyError as error:
        raise ValueError("cannot read " + local)
try:
    fail()
except ValueError:
    log.exception("failed")
"""

#: A server whose tokenizer, template and stream fail on what they are given, and quote it.
CANARY_CODE = """
import asyncio, logging, structlog, sys
from eventlm.cli.logging_setup import configure_logging
from eventlm.config import LogConfig
from tests.server.conftest import RunningServer
from eventlm.config import ServerConfig
configure_logging(LogConfig(log_level="debug"))
server = RunningServer(ServerConfig(port=0, api_key="canary-key"))
key = {"Authorization": "Bearer canary-key"}
fields = {name: "canary" for name in (
    "user", "stop", "cache_salt", "suffix", "metadata", "guided_regex", "response_format", "service_tier", "seed",
    "documents", "chat_template", "chat_template_kwargs", "echo", "return_token_ids", "truncate_prompt_tokens")}
chat = {"model": "test", "messages": [{"role": "user", "content": "canary", "name": "canary"}]}
plain = {"model": "test", "prompt": "canary"}
def ask(path, body, headers=key):
    reply = server.post(path, body, headers)
    print(reply.status, flush=True)
for body, path in ((chat, "/v1/chat/completions"), (plain, "/v1/completions")):
    ask(path, body)
    ask(path, body | {"stop": "canary", "user": "canary", "cache_salt": "canary", "bad_words": ["canary"]})
    for name, value in fields.items():
        ask(path, body | {name: value})
    ask(path, body | {"model": "canary"})
    ask(path, body | {"logit_bias": {"canary": 1}})
    marks = {"metadata": {"canary": "canary"}, "return_token_ids": True, "chat_template_kwargs": {"x": "canary"}}
    ask(path, body | marks)
    ask(path, body | {"metadata": {"canary" * 20: "canary"}})
    ask(path, b'{"canary')
    ask(path, body, {"Authorization": "Bearer canary"})
def broken(text, **_):
    raise ValueError(f"cannot encode {text!r}")
encode, server.context.tokenizer.encode = server.context.tokenizer.encode, broken
ask("/v1/completions", plain)
ask("/v1/chat/completions", chat)
server.context.tokenizer.encode = encode
def broken_later(token_id, seen=[]):
    seen.append(token_id)
    if len(seen) > 3:
        raise UnicodeDecodeError("utf-8", b"canary", 0, 1, "canary")
    return b"x"
server.context.tokenizer.token_bytes = broken_later
ask("/v1/completions", plain | {"stream": True})
async def forgotten():
    raise RuntimeError("canary")
async def forget():
    asyncio.create_task(forgotten())
    await asyncio.sleep(0.01)
server.call(forget())
import gc; gc.collect()
server.loop.call_soon_threadsafe(lambda: (_ for _ in ()).throw(RuntimeError("canary")))
server.call(asyncio.sleep(0.01))
server.stop()
"""


def run(**config: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE, repr(config)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("log_format", ["auto", "json"])
def test_json_lines_where_no_person_reads(log_format: str) -> None:
    done = run(log_format=log_format)
    seen, library, failed = map(json.loads, done.stderr.splitlines())
    assert (seen["event"], seen["level"], seen["logger"], seen["number"]) == ("seen", "info", "eventlm.test", 3)
    assert seen["request_id"] == "req-7"
    assert (library["event"], library["level"], library["logger"]) == ("of a library", "warning", "library")
    assert failed["exception"].startswith("Traceback (most recent call last):")
    # Types and places of the whole chain, and no message.
    assert "KeyError\n\nwhich led to:\n\nTraceback" in failed["exception"]
    assert failed["exception"].endswith("ValueError")
    assert "in fail\n" in failed["exception"]
    assert "canary" not in done.stderr
    assert done.stdout == ""


def test_levels() -> None:
    assert json.loads(run(log_level="debug").stderr.splitlines()[0])["event"] == "unseen"
    assert [json.loads(line)["event"] for line in run(log_level="error").stderr.splitlines()] == ["failed"]


def test_text_without_a_terminal_has_no_colours() -> None:
    shown = run(log_format="text").stderr
    assert "seen" in shown
    # Orders to a terminal are shown, not given.
    assert r"path=/a\x1b[2Jb\x9b" in shown
    assert "request_id=req-7" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("log_format", ["auto", "json"])
def test_on_a_terminal(log_format: str) -> None:
    reader, terminal = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", CODE, repr({"log_format": log_format})], stderr=terminal, timeout=60, check=True
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(reader, 65536)
        except OSError:  # what the terminal's master says once all is read
            break
    os.close(reader)
    text = shown.decode()
    assert "seen" in text
    assert "unseen" not in text
    assert "Traceback (most recent call last):" in text
    assert ("{" in text.replace('{}["canary"]', "")) == (log_format == "json")
    assert ("\x1b" in text) == (log_format == "auto")


def test_nothing_of_what_a_client_sent_is_logged() -> None:
    done = subprocess.run([sys.executable, "-c", CANARY_CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    statuses = done.stdout.split()
    assert {"200", "400", "401", "404", "500"} == set(statuses)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    events = [line["event"] for line in lines]
    assert events.count("request") == len(statuses)
    assert events.count("a request failed") == 2
    assert events.count("a stream failed") == 1
    assert any("never retrieved" in event for event in events)
    assert all(line["request_id"] for line in lines if line["event"] in ("request", "a request failed"))
    assert "canary" not in done.stderr


def test_what_a_worker_prints_is_logged_too_and_a_request_is_found_in_the_trace(tmp_path: Path) -> None:
    fake = ("--model", "fake", "--fake", "die_ppm=1000000")
    server = Server(tmp_path, *fake, "--max-restarts", "1", "--max-losses", "0")
    try:
        server.wait_ready()
        server.complete()
        wait_until(lambda: server.stderr.count("worker says") >= 2)
        wait_until(lambda: '"event":"request"' in server.stderr)
        [arrived] = verified(server.trace).of(Arrived)
    finally:
        server.close()
    lines = [json.loads(line) for line in server.stderr.splitlines()]
    [request] = [line for line in lines if line["event"] == "request"]
    assert (request["seq"], request["status"], request["level"]) == (arrived.s, 503, "warning")
    said = [line for line in lines if line["event"] == "worker says"]
    assert [(line["replica"], line["epoch"]) for line in said] == [(0, 1), (0, 2)]
    assert all(line["line"].startswith("fake worker: drawn to die in step") and line["pid"] for line in said)
