"""`eventlm serve --backend`: a real process before other servers, which stand-ins are for."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from pathlib import Path

import pytest

from eventlm.cli.main import main
from eventlm.errors import ExitCode
from eventlm.events import Arrived, BackendUp, Header
from tests.cli.conftest import RunHere, StartServer
from tests.gateway.stub_backend import StubBackend, chat_prompt, reply_text
from tests.processes import until
from tests.server.http.test_tls import make_certificate

KEY = "s3cr3t-of-the-backend"
#: What only own workers, and tokenizers of checkpoints, need.
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "ray", "triton"}
NOBODY = "http://127.0.0.1:9"
#: All its blocks are looked at after every event of a trace.
SMALL_CACHE = ("--backend-cache-tokens", "4096")
MESSAGES = [{"role": "user", "content": "hi"}]


async def test_it_serves_what_backends_answer_and_loads_nothing_for_models(start_server: StartServer) -> None:
    async with (
        StubBackend("vllm", key=KEY, max_model_len=512) as first,
        StubBackend("llamacpp", max_concurrency=4) as second,
    ):
        server = await asyncio.to_thread(
            start_server,
            *("--backend", f"{first.url},key_env=BACKEND_KEY", "--backend", second.url, "--backend", NOBODY),
            *SMALL_CACHE,
            environment={"PYTHONPROFILEIMPORTTIME": "1", "BACKEND_KEY": KEY},
        )
        loaded = set(re.findall(r"import time: .*\| +(\w+)$", server.stderr, re.MULTILINE))
        assert "aiohttp" in loaded
        assert loaded & HEAVY == set()
        assert server.worker_pids == []
        client = server.async_client()
        for _ in range(4):
            reply = await client.chat.completions.create(model="stub", messages=MESSAGES, seed=5)  # type: ignore[arg-type]
            assert reply.choices[0].message.content == reply_text(chat_prompt(MESSAGES), 5, 8)
        ready = server.log_event("ready")
        assert (ready["model"], ready["max_model_len"], ready["replicas"], ready["device"]) == (
            "stub",
            512,
            3,
            "backends",
        )
        trace = await asyncio.to_thread(server.stop_and_verify)
    assert {each.name for each in trace.of(BackendUp)} == {
        url.removeprefix("http://") for url in (first.url, second.url)
    }
    assert len(trace.of(Arrived)) == 4
    [header] = trace.of(Header)
    described = {each["url"]: each for each in header.host["backends"]}
    assert (described[first.url]["kind"], described[second.url]["max_concurrency"]) == ("vllm", 4)
    assert described[NOBODY] == {"url": NOBODY}
    assert KEY not in server.stderr + server.trace.read_text()


async def test_front_ends_and_own_workers_beside(start_server: StartServer) -> None:
    async with StubBackend("vllm") as stub:
        server = await asyncio.to_thread(
            start_server,
            *("fake", "--replicaset", f"b:backend={stub.url},served_model_name=other", "--api-servers", "1"),
            *("--num-blocks", "600", *SMALL_CACHE),
        )
        client = server.async_client()
        chat = await client.chat.completions.create(model="other", messages=MESSAGES, seed=3)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == reply_text(chat_prompt(MESSAGES), 3, 8)
        own = await client.completions.create(model="fake", prompt="hi", max_tokens=4)
        assert own.usage is not None
        assert own.usage.completion_tokens == 4
        assert [each.id for each in (await client.models.list()).data] == ["fake", "other"]
        assert len(stub.requests) == 1
        await asyncio.to_thread(server.stop_and_verify)


async def test_a_file_of_backends_is_followed(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "backends"

    def replace(*urls: str) -> None:
        new = tmp_path / "new"
        new.write_text("\n".join(urls))
        new.replace(path)

    async with StubBackend("vllm") as first, StubBackend("vllm") as second:
        replace(first.url)
        server = await asyncio.to_thread(
            start_server, "--backend", f"file:{path},max_concurrency=1", "--probe-interval-ms", "20", *SMALL_CACHE
        )
        client = server.async_client()
        replace(second.url)
        await until(lambda: '"reason":"removed"' in server.stderr)
        await client.chat.completions.create(model="stub", messages=MESSAGES)  # type: ignore[arg-type]
        assert (len(first.requests), len(second.requests)) == (0, 1)
        await asyncio.to_thread(server.stop_and_verify)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", NOBODY, "--model", "fake"], "--model is for own workers, and --backend is given"),
        (["--backend", NOBODY, "--port", "9"], f"--backend {NOBODY} is the address of this server itself"),
        (["--backend", f"{NOBODY},key={KEY},quick=1"], "unknown key 'quick'"),
        (["fake", "--hedge-ms", "5"], "--hedge-ms is for backends, and there is none"),
    ],
)
def test_mistakes(run_here: RunHere, flags: list[str], message: str) -> None:
    code, _, errors = run_here("serve", "--port", "0", *flags)
    assert (code, errors.count("\n")) == (ExitCode.USAGE, 1), errors
    assert message in errors
    assert KEY not in errors


def test_a_start_without_any_backend_may_be_tried_again(run_here: RunHere) -> None:
    code, _, errors = run_here("serve", "--port", "0", "--backend", NOBODY)
    assert (code, errors.count("\n")) == (ExitCode.FAILED, 1), errors
    assert f"no backend answers: cannot connect to {NOBODY}/v1/models: Connection refused" in errors


async def test_backends_that_do_not_fit(run_here: RunHere, tmp_path: Path) -> None:
    def fails(*flags: str) -> str:
        code, _, errors = run_here("serve", "--port", "0", "--record", str(tmp_path), *flags)
        assert (code, errors.count("\n")) == (ExitCode.USAGE, 1), errors
        return errors

    async with StubBackend("vllm", key=KEY, model="a") as locked, StubBackend("vllm", model="b") as open_one:
        errors = await asyncio.to_thread(fails, "--backend", locked.url, "--backend", open_one.url)
        assert f"{locked.url}/v1/models wants another key (HTTP 401" in errors
        both = ("--backend", f"{locked.url},key={KEY}", "--backend", open_one.url)
        errors = await asyncio.to_thread(fails, *both)
        assert f"{locked.url} serves a and {open_one.url} b, and requests go by one name" in errors
        errors = await asyncio.to_thread(fails, "--backend", open_one.url, "--tokenizer", str(tmp_path / "none"))
        assert "--tokenizer" in errors
        assert "no such folder" in errors


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_a_certificate_that_is_not_trusted(run_here: RunHere, tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*make_certificate(tmp_path, "own"))
    async with StubBackend(tls=context) as stub, StubBackend() as other:
        code, _, errors = await asyncio.to_thread(
            run_here, "serve", "--port", "0", "--no-record", "--backend", other.url, "--backend", stub.url
        )
    assert (code, errors.count("\n")) == (ExitCode.USAGE, 1), errors
    assert f"{stub.url}/v1/models shows a certificate that is not trusted" in errors
    assert "ca_file=FILE" in errors


def test_a_key_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--backend", f"{NOBODY},key={KEY}", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert f'# backend = ["{NOBODY},key=***"]' in printed
    assert KEY not in printed
