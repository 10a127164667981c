"""What backends say at a start, and what is wrong with it in one line."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.bootstrap.backends import AskedSet, ask_backends, backends_setup
from eventlm.config import Config
from eventlm.config.backends import BackendSpec
from eventlm.config.load import load_config
from eventlm.engine.backend import BackendError, BackendFacts
from eventlm.errors import CheckpointError, ExitCode, UsageError
from tests.engine.backends.fake_backend import FakeBackend

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
KEY = "s3cr3t"
NEVER = "never"

Answer = BackendFacts | BackendError | str


class SilentBackend(FakeBackend):
    async def ask(self) -> BackendFacts:
        await asyncio.Event().wait()
        raise AssertionError


def connecting(answers: dict[str, Answer], made: list[FakeBackend]) -> Callable[[BackendSpec], FakeBackend]:
    """Makes clients of backends that say so when they are asked."""

    def connect(spec: BackendSpec) -> FakeBackend:
        answer = answers[spec.url]
        client = SilentBackend(spec) if isinstance(answer, str) else FakeBackend(spec)
        if isinstance(answer, BackendFacts):
            client.facts = answer
        elif isinstance(answer, BackendError):
            client.error = answer
        made.append(client)
        return client

    return connect


def config_of(*specs: str, **options: Any) -> Config:
    return load_config(None, {"backend": list(specs)} | options, environment={})


def ask(config: Config, answers: dict[str, Answer]) -> dict[str, AskedSet]:
    made: list[FakeBackend] = []
    try:
        return asyncio.run(ask_backends(config, connecting(answers, made), seconds=0.05))
    finally:
        assert all(client.is_closed for client in made)


def error_of(config: Config, answers: dict[str, Answer]) -> str:
    with pytest.raises((UsageError, CheckpointError)) as caught:
        backends_setup(config, ask(config, answers)["main"])
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def facts(*models: str, **more: Any) -> BackendFacts:
    return BackendFacts(kind="vllm", models=list(models), **more)


def down(url: str) -> BackendError:
    return BackendError(f"cannot reach {url}: connection refused", "connect")


def test_one_that_answers_is_enough() -> None:
    config = config_of(A, f"{B},key={KEY}")
    asked = ask(config, {A: facts("m"), B: down(B)})["main"]
    assert [(each.spec.url, each.facts) for each in asked.found] == [(A, facts("m")), (B, None)]
    assert asked.warnings == [f"cannot reach {B}: connection refused; it is tried again"]
    setup = backends_setup(config, asked)
    assert setup.core.models == ["m"]
    assert [spec.key for spec in setup.backends] == ["", KEY]
    assert setup.backends_host["backends"][1] == {"url": B}


def test_each_set_is_asked() -> None:
    config = config_of(A, replicasets=[f"b:backend={B}", "c:model=x"])
    asked = ask(config, {A: facts("m"), B: facts("n")})
    assert {name: [each.spec.url for each in own.found] for name, own in asked.items()} == {"main": [A], "b": [B]}
    message = error_of(config, {A: facts("m"), B: down(B)})
    assert message == f"replicaset b: no backend answers: cannot reach {B}: connection refused"


def test_without_any_answer_each_is_named() -> None:
    message = error_of(config_of(A, B), {A: down(A), B: NEVER})
    assert message == f"no backend answers: cannot reach {A}: connection refused; {B} did not answer within 0.05 s"


@pytest.mark.parametrize(
    ("backend", "answers", "code"),
    [
        (A, {A: down(A)}, ExitCode.FAILED),
        ("dns:nowhere.invalid:80", {}, ExitCode.FAILED),
        (A, {A: BackendError(f"{A} wants another key (HTTP 401)", "server", status=401)}, ExitCode.USAGE),
    ],
)
def test_a_service_manager_starts_it_again_where_a_backend_may_come_up(
    backend: str, answers: dict[str, Answer], code: ExitCode
) -> None:
    with pytest.raises(UsageError) as caught:
        ask(config_of(backend), answers)
    assert caught.value.exit_code == code


def tls_error() -> BackendError:
    error = BackendError(f"{B} shows a certificate that is not trusted", "connect")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BackendError(f"{B} wants another key (HTTP 401)", "server", status=401), f"{B} wants another key (HTTP 401)"),
        (BackendError("Forbidden.", "server", status=403), f"{B}: Forbidden"),
        (tls_error(), f"{B} shows a certificate that is not trusted"),
        (BackendError(f"{B} names no model", "protocol"), f"{B} names no model"),
        (BackendError(f"{B} does not serve 'x'", "refused"), f"{B} does not serve 'x'"),
    ],
)
def test_what_waiting_does_not_change_is_an_error_though_others_answer(error: BackendError, message: str) -> None:
    assert error_of(config_of(A, B), {A: facts("m"), B: error}) == message


def test_names_of_the_model() -> None:
    def name(config: Config, first: BackendFacts, second: BackendFacts) -> list[str]:
        return backends_setup(config, ask(config, {A: first, B: second})["main"]).core.models

    assert name(config_of(A, B), facts("x", "m"), facts("m")) == ["m"]
    assert name(config_of(A, B), facts("x", "m"), facts()) == ["x"]
    assert name(config_of(A, f"{B},model=x", served_model_name="s"), facts("x"), facts("y")) == ["s"]
    assert name(config_of(f"{A},model=x", f"{B},model=y"), facts("x"), facts("y")) == ["x"]
    assert error_of(config_of(A, B), {A: facts("x"), B: facts("y", "z")}) == (
        f"{A} serves x and {B} y, z, and requests go by one name: if they are one model, put model=NAME after each "
        "URL, else make them two replicasets"
    )
    for config in (config_of(f"{A},model=x", B), config_of(A, B, served_model_name="s")):
        assert f"{A} serves x and {B} y" in error_of(config, {A: facts("x"), B: facts("y")})
    assert "give --served-model-name" in error_of(config_of(A), {A: facts()})


def test_a_context_that_a_backend_does_not_take() -> None:
    message = error_of(config_of(A, max_model_len=9000), {A: facts("m", max_model_len=8192)})
    assert message == f"--max-model-len 9000: {A} takes contexts of up to 8192 tokens; lower it"


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "no", "no such folder"), (tmp_path, "has no tokenizer.json")):
        found = error_of(config_of(A, tokenizer=str(folder)), {A: facts("m")})
        assert found.startswith(f"--tokenizer {folder}: ")
        assert message in found


def test_the_server_itself() -> None:
    for host, url in (("127.0.0.1", "http://localhost:1001/v1"), ("0.0.0.0", A), ("::", "http://127.0.0.3:1001")):
        config = config_of(url, host=host, port=1001)
        assert "is the address of this server itself; leave it out" in error_of(config, {})
    for host, url in (("127.0.0.1", "http://127.0.0.2:1001"), ("0.0.0.0", "http://192.0.2.1:1001"), ("0.0.0.0", B)):
        assert ask(config_of(url, host=host, port=1001), {url: facts("m")})


def test_addresses_of_a_name_and_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        known = {"llm": ["127.0.0.2", "127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}
        if host not in known:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    path = tmp_path / "backends"
    path.write_text(f"{B}\nhttp://127.0.0.2:1001\n")
    config = config_of("dns:llm:1001,weight=2", f"file:{path}")
    urls = [A, "http://127.0.0.2:1001", B]
    found = ask(config, dict.fromkeys(urls, facts("m")))["main"].found
    assert [(each.spec.url, each.spec.weight) for each in found] == [(urls[0], 2), (urls[1], 2), (B, 1)]
    assert error_of(config_of("dns:nowhere:80"), {}) == "--backend dns:nowhere:80: the name nowhere is not known"
    path.write_text("# none yet\n")
    assert error_of(config_of(f"file:{path}"), {}) == "--backend: there is no backend"
    path.write_text(f"{A}\n{B}\n")
    message = "--backend: there are 2 backends, and there may be 1 (--max-backends)"
    assert error_of(config_of(f"file:{path}", max_backends=1), {}) == message
