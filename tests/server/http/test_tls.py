"""HTTPS over real sockets: versions, files that cannot be used, a certificate that is replaced under the server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from eventlm.client.errors import ClientError
from eventlm.client.openai_client import OpenAIClient
from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.server.http.connection import Connection
from eventlm.server.http.tls import Tls
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import RunningServer, capture_logs

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


def make_certificate(folder: Path, name: str, *, password: str = "") -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    secrecy = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secrecy),
            *("-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "first")


def fetch(server: RunningServer, certificate: Path, *, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> int:
    context = ssl.create_default_context(cafile=str(certificate))
    context.maximum_version = most
    with urllib.request.urlopen(
        f"https://127.0.0.1:{server.port}/health", context=context, timeout=PATIENCE_SECONDS
    ) as reply:
        return int(reply.status)


def test_https(start_server: Callable[..., RunningServer], files: tuple[Path, Path]) -> None:
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]))
    context = ssl.create_default_context(cafile=str(files[0]))
    with openai.OpenAI(
        base_url=f"https://127.0.0.1:{server.port}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(verify=context),
    ) as client:
        chunks = client.completions.create(model="test", prompt="hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world"
    # Who does not speak TLS gets no answer, and disturbs nobody.
    plain = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert not plain.recv(65536).startswith(b"HTTP/")
    assert fetch(server, files[0], most=ssl.TLSVersion.TLSv1_2) == 200
    assert server.context.tls is not None
    assert server.context.tls.context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_client_says_that_it_does_not_trust(
    start_server: Callable[..., RunningServer], files: tuple[Path, Path]
) -> None:
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]))
    async with OpenAIClient(f"https://127.0.0.1:{server.port}") as client:
        with pytest.raises(
            ClientError, match=r"certificate that is not trusted .*; if it is your own, .*SSL_CERT_FILE"
        ):
            await client.models()


def test_a_certificate_is_replaced(
    start_server: Callable[..., RunningServer], files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(files[0], certificate)
    shutil.copy(files[1], key)
    server = start_server(tls_cert=str(certificate), tls_key=str(key))
    second = make_certificate(tmp_path, "second")
    # A certificate without its key: the old one stays.
    shutil.copy(second[0], certificate)
    with capture_logs() as logs:
        server.context.reload()
    assert [line["log_level"] for line in logs] == ["error"]
    assert str(key) in logs[0]["error"]
    assert fetch(server, files[0]) == 200
    shutil.copy(second[1], key)
    server.context.reload()
    assert fetch(server, second[0]) == 200
    with pytest.raises(OSError):
        fetch(server, files[0])


def test_files_that_cannot_be_used(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = map(str, files)
    other_key = str(make_certificate(tmp_path, "other")[1])
    locked = tuple(map(str, make_certificate(tmp_path, "locked", password="secret")))
    nothing = str(tmp_path / "none.pem")
    (tmp_path / "text.pem").write_text("hello")
    text = str(tmp_path / "text.pem")
    for given, words in [
        ((certificate, ""), "--tls-cert needs --tls-key too"),
        (("", key), "--tls-key needs --tls-cert too"),
        ((nothing, key), f"--tls-cert {nothing}: No such file or directory"),
        ((certificate, nothing), f"--tls-key {nothing}: No such file or directory"),
        ((certificate, str(tmp_path)), f"--tls-key {tmp_path}: Is a directory"),
        ((certificate, other_key), f"--tls-key {other_key}: it is not the key of the certificate of --tls-cert"),
        ((text, key), f"--tls-cert {text}: there is no whole certificate in PEM in it"),
        ((key, key), f"--tls-cert {key}: there is no whole certificate in PEM in it"),
        ((certificate, text), f"--tls-key {text}: there is no whole private key in PEM in it"),
        ((certificate, certificate), f"--tls-key {certificate}: there is no whole private key in PEM in it"),
        (locked, f"--tls-key {locked[1]}: the key is encrypted"),
    ]:
        with pytest.raises(UsageError) as raised:
            Tls.of(ServerConfig(tls_cert=given[0], tls_key=given[1]))
        assert words in str(raised.value)
    assert Tls.of(ServerConfig()) is None


def test_files_that_change_while_they_are_read_again(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(files[0], certificate)
    shutil.copy(files[1], key)
    tls = Tls(str(certificate), str(key))
    other = make_certificate(tmp_path, "other")[1]

    class Overtaken:
        """The context in use; by the time that it reads the files, the next pair is half there."""

        def load_cert_chain(self, *arguments: Any, **named: Any) -> None:
            shutil.copy(other, key)
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*arguments, **named)

    tls.context = cast(ssl.SSLContext, Overtaken())
    with capture_logs() as logs:
        assert not tls.reload()
    assert [line["log_level"] for line in logs] == ["error"]


def ends(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE_SECONDS)
    try:
        return not connection.recv(65536)
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_handshakes_that_never_end_are_ended_and_keep_no_client_out(
    start_server: Callable[..., RunningServer], files: tuple[Path, Path]
) -> None:
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]), header_timeout_seconds=3, max_connections=150)
    # Nothing at all, the beginning of a greeting, and what is none.
    silent = [server.raw((b"", b"\x16\x03\x01\x02\x00\x01")[number % 2]) for number in range(100)]
    garbage = [server.raw(b"GET / HTTP/1.1\r\n\r\n") for _ in range(20)]
    wait_until(lambda: server._server.num_connections == 100)
    assert fetch(server, files[0]) == 200
    assert all(ends(connection) for connection in [*garbage, *silent])
    wait_until(lambda: server._server.num_connections == 0)
    assert fetch(server, files[0]) == 200
    for connection in [*garbage, *silent]:
        connection.close()


def test_handshakes_count_as_connections(start_server: Callable[..., RunningServer], files: tuple[Path, Path]) -> None:
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]), max_connections=3)
    silent = [server.raw(b"") for _ in range(3)]
    wait_until(lambda: server._server.num_connections == 3)
    assert ends(server.raw(b""))
    with pytest.raises(OSError):
        fetch(server, files[0])
    silent.pop().close()
    wait_until(lambda: server._server.num_connections == 2)
    assert fetch(server, files[0]) == 200
    for connection in silent:
        connection.close()


def test_a_connection_that_has_become_secure_counts_once(
    start_server: Callable[..., RunningServer], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]))
    counts = []
    made = Connection.connection_made

    def counted(connection: Connection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        counts.append(server._server.num_connections)

    monkeypatch.setattr(Connection, "connection_made", counted)
    assert fetch(server, files[0]) == 200
    assert counts == [1]


def test_a_server_stops_amid_handshakes(start_server: Callable[..., RunningServer], files: tuple[Path, Path]) -> None:
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]))
    silent = server.raw(b"")
    wait_until(lambda: server._server.num_connections == 1)
    server.call(server._server.close())
    assert ends(silent)
    assert server._server.num_connections == 0
    silent.close()


def test_a_server_stops_while_it_accepts(start_server: Callable[..., RunningServer], files: tuple[Path, Path]) -> None:
    """Of those that have just been accepted some have not begun their handshake."""
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]))

    async def connect_and_close() -> list[socket.socket]:
        clients = [socket.create_connection((server.host, server.port)) for _ in range(20)]
        while server._server.num_connections < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await server._server.close()
        return clients

    clients = server.call(connect_and_close())
    assert server._server.num_connections == 0
    assert all(ends(client) for client in clients)
    for client in clients:
        client.close()


def test_a_request_that_comes_with_the_last_of_the_handshake(
    start_server: Callable[..., RunningServer], files: tuple[Path, Path]
) -> None:
    """In TLS 1.3 the client may speak before the server has seen its last word."""
    server = start_server(tls_cert=str(files[0]), tls_key=str(files[1]))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(files[0])).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    connection = server.raw(b"")

    def step(action: Callable[[], Any]) -> Any:
        while True:
            try:
                return action()
            except ssl.SSLWantReadError:
                if outgoing.pending:
                    connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))

    step(client.do_handshake)
    client.write(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    # One packet for the client's end of the handshake and for its request.
    connection.sendall(outgoing.read())
    assert step(lambda: client.read(65536)).startswith(b"HTTP/1.1 200")
    connection.close()
