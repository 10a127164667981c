"""`/v1/files` by the official client, and by others that send whatever they like."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http_exchange import Reply
from tests.processes import wait_until
from tests.server.batches.full_disk import FullDisk
from tests.server.batches.input_files import chat_line, create, upload
from tests.server.conftest import INVALID, RunningServer, assert_error, assert_serves

StartWithClient = Callable[..., tuple[RunningServer, openai.OpenAI]]


@pytest.fixture
def start(start_with_client: StartWithClient, tmp_path: Path) -> StartWithClient:
    return lambda **settings: start_with_client(batch_dir=str(tmp_path / "batches"), **settings)


def stored(folder: Path) -> list[str]:
    """Kinds of the files in the folder."""
    return sorted(path.suffix for path in folder.rglob("file-*"))


def form(*parts: tuple[str, str, bytes], boundary: str = "b0und") -> bytes:
    """Parts: the name, further parameters of the disposition, and the content."""
    heads = [b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
        boundary.encode(), name.encode(), more.encode(), content) for name, more, content in parts]  # fmt: skip
    return b"".join(heads) + b"--%b--\r\n" % boundary.encode()


def send(server: RunningServer, data: bytes, **headers: str) -> Reply:
    return server.request("POST", "/v1/files", data, {"Content-Type": "multipart/form-data; boundary=b0und"} | headers)


PURPOSE = ("purpose", "", b"batch")
FILE = ("file", '; filename="in.jsonl"', b"{}\n")


def test_a_file_from_its_upload_to_its_deletion(start: StartWithClient, tmp_path: Path) -> None:
    server, client = start()
    data = bytes(range(256)) * 20_000
    made = client.files.create(file=("täglich.jsonl", data), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(data), "täglich.jsonl", "batch", "processed")
    assert made.expires_at == made.created_at + 30 * 86_400
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == data
    with client.files.with_streaming_response.content(made.id) as response:
        digest = hashlib.sha256(b"".join(response.iter_bytes()))
    assert digest.hexdigest() == hashlib.sha256(data).hexdigest()
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert stored(tmp_path) == []
    assert_serves(server)


def test_a_head_has_no_body(start: StartWithClient) -> None:
    server, client = start()
    file_id = upload(client, chat_line("a"))
    head = f"HEAD /v1/files/{file_id}/content HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with server.raw(head.encode()) as connection:
        reply = b"".join(iter(lambda: connection.recv(1000), b""))
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert reply.endswith(b"\r\n\r\n")
    assert b"Content-Length: %d\r\n" % client.files.retrieve(file_id).bytes in reply


def test_lists_are_pages_in_either_order(start: StartWithClient) -> None:
    _, client = start()
    ids = [upload(client, chat_line("a"), name=f"{number}.jsonl") for number in range(5)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == ids
    page = client.files.list(order="asc", limit=2, after=ids[1])
    assert ([file.id for file in page.data], page.has_more) == (ids[2:4], True)
    assert client.files.list(purpose="batch_output").data == []
    with pytest.raises(openai.BadRequestError, match="'after'"):
        client.files.list(after="file-x")


@pytest.mark.parametrize(
    ("query", "code", "message"),
    [
        ("limit=0", "invalid_value", "limit must be at least 1"),
        ("limit=10001", "invalid_value", "limit must be at most 10000"),
        ("limit=x", "invalid_type", "expected `int`"),
        ("order=up", "invalid_value", "supported values are 'asc', 'desc'"),
    ],
)
def test_a_wrong_query_is_named(start: StartWithClient, query: str, code: str, message: str) -> None:
    server, _ = start()
    name = query.partition("=")[0]
    assert_error(server.request("GET", f"/v1/files?{query}"), 400, INVALID, name, code, message)


def test_a_file_says_when_it_expires(start: StartWithClient) -> None:
    _, client = start()
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    made = client.files.create(file=b"{}", purpose="batch", expires_after=expiry)
    assert made.expires_at == made.created_at + 3600
    for wrong, param in (({"seconds": 3599}, "seconds"), ({"anchor": "now"}, "anchor"), ({"seconds": "x"}, "seconds")):
        with pytest.raises(openai.BadRequestError) as error:
            client.files.create(file=b"{}", purpose="batch", expires_after=expiry | wrong)
        assert error.value.param == f"expires_after.{param}"


def test_the_expiry_may_be_json(start: StartWithClient) -> None:
    server, _ = start()
    for value, seconds in ((b'{"anchor": "created_at", "seconds": 7200}', 7200), (b"null", 30 * 86_400)):
        made = send(server, form(PURPOSE, ("expires_after", "", value), FILE)).json()
        assert made["expires_at"] - made["created_at"] == seconds
    for value, param in ((b"{", ""), (b"7", ""), (b'{"anchor": "created_at", "seconds": null}', ".seconds")):
        reply = send(server, form(PURPOSE, ("expires_after", "", value), FILE))
        assert (reply.status, reply.json()["error"]["param"]) == (400, "expires_after" + param)


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "user_data"])
def test_other_purposes_are_refused_by_name(start: StartWithClient, tmp_path: Path, purpose: Any) -> None:
    _, client = start()
    with pytest.raises(openai.BadRequestError, match=f"only 'batch' is supported here, got '{purpose}'") as error:
        client.files.create(file=b"{}", purpose=purpose)
    assert error.value.param == "purpose"
    assert stored(tmp_path) == []


#: A body, its status, and the param and words of the error.
BROKEN: list[tuple[bytes, int, str | None, str]] = [
    (form(FILE), 400, "purpose", "Missing required parameter"),
    (form(PURPOSE), 400, "file", "Missing required parameter"),
    (form(PURPOSE, FILE, FILE), 400, "file", "one file at a time"),
    (form(PURPOSE, FILE, boundary="other"), 400, None, "The form is broken"),
    (b"", 400, None, "The form is broken"),
    (b"nothing of a form", 400, None, "The form is broken"),
    (form(("purpose", "", b"x" * 5000), FILE), 400, "purpose", "too long"),
    (form(("purpose", "", b"\xff"), FILE), 400, "purpose", "UTF-8"),
    (form(*[(f"x{n}", "", b"") for n in range(40)]), 400, None, "more than 32 fields"),
    (b"--b0und\r\nContent-Type: text/plain\r\n\r\nx\r\n--b0und--\r\n", 400, None, "a field with a name"),
    (
        b"--b0und\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c--\r\n--b0und--\r\n",
        400,
        None,
        "form is broken",
    ),
    (form(("a\x01b", "", b"1"), FILE), 400, None, "The form is broken"),
    (form(("x" * 9000, "", b"1"), FILE), 400, None, "The form is broken"),
    (form(PURPOSE, FILE).replace(b'jsonl"', b'"\r\nContent-Transfer-Encoding: base64'), 400, None, "as they are"),
    (form(PURPOSE, FILE)[:-12], 400, None, "The form is broken"),
]


def test_names_of_any_bytes(start: StartWithClient) -> None:
    server, client = start()
    data = form(PURPOSE, ("x?", "", b"\xff"), ("file", '; filename="?.jsonl"', b"{}")).replace(b"?", b"\xc2\xff")
    assert_error(send(server, data), 400, INVALID, "x??", "invalid_type", "a text in UTF-8")
    assert send(server, data.replace(b"\xff\r", b"1\r")).json()["filename"] == "??.jsonl"
    assert [file.filename for file in client.files.list()] == ["??.jsonl"]


@pytest.mark.parametrize(("body", "status", "param", "words"), BROKEN)
def test_a_broken_form_leaves_nothing(
    start: StartWithClient, tmp_path: Path, body: bytes, status: int, param: str | None, words: str
) -> None:
    server, _ = start()
    reply = send(server, body)
    assert (reply.status, reply.json()["error"]["param"]) == (status, param), reply.data
    assert words in reply.json()["error"]["message"]
    assert stored(tmp_path) == []
    # In any order of its fields.
    assert send(server, form(FILE, PURPOSE)).status == 200
    assert send(server, form(PURPOSE, ("extra", "", b"1"), FILE)).status == 200


def test_what_is_no_form(start: StartWithClient) -> None:
    server, _ = start()
    assert_error(server.post("/v1/files", {"purpose": "batch"}), 415, INVALID, message="multipart/form-data")
    assert_error(send(server, form(PURPOSE, FILE), **{"Content-Encoding": "gzip"}), 415, INVALID)
    assert_error(send(server, b"", **{"Content-Type": "multipart/form-data"}), 400, INVALID, message="broken")


def test_a_file_that_is_too_large_is_refused_before_and_while_it_comes(start: StartWithClient, tmp_path: Path) -> None:
    server, client = start(max_file_bytes=1024)
    assert client.files.create(file=b"x" * 1024, purpose="batch").bytes == 1024
    for size in (1025, 5_000_000):
        with pytest.raises(openai.APIStatusError) as error:
            client.files.create(file=b"x" * size, purpose="batch")
        assert error.value.status_code == 413
    assert stored(tmp_path) == [".json", ".jsonl"]
    assert_serves(server)


def test_a_key_may_have_so_many_files_and_bytes(start: StartWithClient, tmp_path: Path) -> None:
    _, client = start(batch_max_objects=3, batch_storage="2KiB")
    first = client.files.create(file=b"x" * 1500, purpose="batch").id
    with pytest.raises(openai.BadRequestError, match="may have 2048 bytes together, and have 1500") as error:
        client.files.create(file=b"x" * 600, purpose="batch")
    assert error.value.code == "storage_limit_exceeded"
    client.files.delete(first)
    for _ in range(3):
        client.files.create(file=b"x" * 500, purpose="batch")
    with pytest.raises(openai.BadRequestError, match="has 3 files, the most it may have") as error:
        client.files.create(file=b"x", purpose="batch")
    assert error.value.code == "too_many_files"
    assert stored(tmp_path) == [".json"] * 3 + [".jsonl"] * 3


def test_an_upload_that_no_longer_fits_makes_room_for_others(start: StartWithClient, tmp_path: Path) -> None:
    server, client = start(batch_storage="6MiB")
    data = form(PURPOSE, ("file", '; filename="a"', b"x" * 5_700_000))
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b0und\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"

    def num_written() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*.upload"))

    with server.raw(head + chunk(data[:5_000_000])) as first:
        wait_until(lambda: num_written() > 2_500_000)
        # The server may hang up before it has read all.
        with server.raw(head) as second, contextlib.suppress(OSError):
            second.sendall(chunk(data[:-10]))
            assert second.recv(1000).startswith(b"HTTP/1.1 400 ")
        wait_until(lambda: len(stored(tmp_path)) == 1)
        first.sendall(chunk(data[5_000_000:]) + chunk(b""))
        assert first.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert [file.bytes for file in client.files.list()] == [5_700_000]
    assert stored(tmp_path) == [".json", ".jsonl"]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_an_upload_that_breaks_off_leaves_nothing(start: StartWithClient, tmp_path: Path) -> None:
    server, _ = start()
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b0und\r\n"
    data = form(PURPOSE, ("file", '; filename="f"', b"x" * 3_000_000))
    connection = server.raw(head + b"Content-Length: %d\r\n\r\n" % len(data) + data[:2_000_000])
    wait_until(lambda: stored(tmp_path) == [".upload"])
    connection.close()
    wait_until(lambda: stored(tmp_path) == [])


def test_an_upload_that_stops_gets_an_error(start: StartWithClient, tmp_path: Path) -> None:
    server, _ = start(body_timeout_seconds=1)
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b0und\r\n"
    connection = server.raw(head + b"Content-Length: 1000\r\n\r\n" + form(PURPOSE, FILE)[:-20])
    assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
    connection.close()
    wait_until(lambda: stored(tmp_path) == [])


def test_a_waiting_client_may_send_a_large_file(start: StartWithClient) -> None:
    server, _ = start(max_body_bytes=1024)
    data = form(PURPOSE, ("file", '; filename="f"', b"x" * 5000))
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b0und\r\n"
    connection = server.raw(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data))
    assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(data)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    connection.close()


def test_a_full_disk_is_a_507_that_nobody_tries_again(start: StartWithClient, tmp_path: Path) -> None:
    disk = FullDisk()
    server, client = start(disk=disk)
    kept = upload(client, chat_line("a"))
    for room in (0, 100, 2_000_010):
        disk.room = room
        with pytest.raises(openai.APIStatusError, match=r"no room for this \(No space left on device\)") as error:
            client.files.create(file=b"x" * 2_000_000, purpose="batch")
        assert (error.value.status_code, error.value.code) == (507, "disk_full")
        assert error.value.response.headers["x-should-retry"] == "false"
    assert stored(tmp_path) == [".json", ".jsonl"]
    assert_serves(server)
    # Which makes room.
    client.files.delete(kept)


def test_the_input_of_a_batch_that_runs_cannot_be_deleted(start: StartWithClient) -> None:
    server, client = start(batch_window=1)
    server.engine.most_said = 0
    batch = client.batches.retrieve(create(client, chat_line("a")))
    with pytest.raises(openai.ConflictError, match=f"the input of {batch.id}, which is not over"):
        client.files.delete(batch.input_file_id)


def test_without_a_folder_there_are_none(server: RunningServer) -> None:
    asked = [
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("GET", "/v1/files/file-1/content"),
        ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/batch_1"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ]
    for method, path in asked:
        reply = server.request(method, path)
        assert_error(reply, 404, INVALID, code="batches_not_enabled", message="start it with --batch-dir DIR")
