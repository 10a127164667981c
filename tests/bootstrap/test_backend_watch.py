"""Lists of backends that change, and that cannot be read for a while."""

from __future__ import annotations

import os
import socket
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from eventlm.bootstrap.backend_watch import list_backends, watch
from eventlm.config.backends import BackendSpec, DnsBackends, FileBackends
from eventlm.errors import UsageError
from tests.failing_disk import FailingDisk

COMMON = BackendSpec(url="", weight=2)


def urls(specs: list[BackendSpec]) -> list[str]:
    return [spec.url for spec in specs]


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, new = tmp_path / "backends", tmp_path / "new"

    def replace(text: str) -> None:
        new.write_text(text)
        os.replace(new, path)

    replace("http://a:1\n")
    with capture_logs() as logs:
        async with aclosing(watch(FileBackends(str(path), COMMON), [COMMON], seconds=0.001)) as lists:
            # One that was there at the start may be gone already.
            assert await anext(lists) == [COMMON]
            assert await anext(lists) == [BackendSpec(url="http://a:1", weight=2)]
            replace("http://a:1\nhttp://b:2\n")
            assert urls(await anext(lists)) == ["http://a:1", "http://b:2"]
            replace("nonsense\n")
            for _ in range(2):
                assert urls(await anext(lists)) == ["http://a:1", "http://b:2"]
            path.unlink()
            assert urls(await anext(lists)) == ["http://a:1", "http://b:2"]
            replace("http://c:3\n")
            assert urls(await anext(lists)) == ["http://c:3"]
            before = path.stat()
            path.write_text("http://d:4\n")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert urls(await anext(lists)) == ["http://d:4"]
    assert [each["event"] for each in logs] == ["backends cannot be listed; those that are there stay"] * 2
    assert "line 1: nonsense: it must be a URL" in logs[0]["reason"]
    assert "No such file" in logs[1]["reason"]


async def test_a_file_that_could_not_be_read_once_is_read_again_though_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "backends"
    path.write_text("http://a:1\n")
    with capture_logs() as logs:
        async with aclosing(watch(FileBackends(str(path), COMMON), [], seconds=0.001, disk=FailingDisk(2))) as lists:
            while not (found := await anext(lists)):
                pass
    assert urls(found) == ["http://a:1"]
    assert [each["reason"] for each in logs] == [f"--backend file:{path}: cannot read it: Input/output error"]


async def test_the_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["10.0.0.2", "10.0.0.1"]

    def resolve(*_: object, **__: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    name = DnsBackends("llm", 80, COMMON)
    async with aclosing(watch(name, [], seconds=0.001)) as lists:
        assert await anext(lists) == []
        assert urls(await anext(lists)) == ["http://10.0.0.1:80", "http://10.0.0.2:80"]
        addresses.pop()
        assert urls(await anext(lists)) == ["http://10.0.0.2:80"]
    addresses.clear()
    with pytest.raises(UsageError, match="the name llm is not known"):
        await list_backends(name)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_what_cannot_be_a_name_is_not_known(host: str) -> None:
    with pytest.raises(UsageError, match="is not known"):
        await list_backends(DnsBackends(host, 80, COMMON))
