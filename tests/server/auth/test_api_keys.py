"""Keys: files that cannot be used, reloads, scopes, and that nothing tells one key from another by time or by log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from eventlm.config import ServerConfig
from eventlm.engine.rate_limits import RateLimits
from eventlm.errors import UsageError
from eventlm.server.auth import api_keys
from eventlm.server.auth.api_keys import ANYBODY, ApiKeys, read_key_file
from eventlm.system.disk import SystemDisk
from eventlm.system.system import real_system
from tests.failing_disk import FailingDisk
from tests.processes import wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error, capture_logs

TWO_KEYS = f"""
[[keys]]
name = "alice"
key = "sk-alice"
service_class = "interactive"
limits = {{ requests_per_minute = 60, tokens_per_minute = 1_000 }}

[[keys]]
name = "ops"
sha256 = "{sha256(b"sk-ops").hexdigest()}"
scopes = ["admin"]
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.rename(path)
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", TWO_KEYS)


def keys_of(path: Path, **settings: Any) -> ApiKeys:
    return ApiKeys(real_system(), ServerConfig(api_keys_file=str(path), **settings))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_file_of_keys(key_file: Path) -> None:
    keys = keys_of(key_file, api_key="sk-env")
    alice, ops, default = keys.find("sk-alice"), keys.find("sk-ops"), keys.find("sk-env")
    assert alice is not None
    assert ops is not None
    assert default is not None
    assert (alice.name, alice.scopes, alice.service_class) == ("alice", ("inference",), "interactive")
    assert alice.limits == RateLimits(requests_per_minute=60, tokens_per_minute=1000)
    assert (ops.name, ops.scopes, bool(ops.limits)) == ("ops", ("admin",), False)
    assert (default.name, default.scopes) == ("default", ("inference",))
    assert (len(keys), keys.has_scope("admin")) == (3, True)
    assert keys.find("sk-alice ") is None
    assert keys.find("") is None
    assert keys.find("\udcff") is None


def test_the_holder_of_what_an_owner_has(key_file: Path) -> None:
    keys = keys_of(key_file)
    alice = keys.find("sk-alice")
    assert alice is not None
    assert keys.holder(alice.owner) == alice
    # What was made without a key has no holder where there are keys, nor does a key's where there are none.
    assert keys.holder(ANYBODY.owner) is None
    without = ApiKeys(real_system(), ServerConfig())
    assert without.holder(alice.owner) is None
    assert without.holder(ANYBODY.owner) == ANYBODY


def test_owners_stand_for_name_and_key_in_every_process(key_file: Path) -> None:
    def owner(text: str, key: str) -> str:
        found = keys_of(write(key_file, text)).find(key)
        assert found is not None
        return found.owner

    owners = [
        owner(TWO_KEYS, "sk-alice"),
        owner(TWO_KEYS, "sk-ops"),
        owner(TWO_KEYS.replace("alice", "bob"), "sk-bob"),
        owner(TWO_KEYS.replace('"alice"', '"bob"'), "sk-alice"),
    ]
    assert len(set(owners)) == 4
    assert owner(TWO_KEYS, "sk-alice") == owners[0]
    assert not any("alice" in each or sha256(b"sk-alice").hexdigest()[:8] in each for each in owners)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no [[keys]] table"),
        ("keys = 1", "keys must be tables, one [[keys]] for each key"),
        ("[keys]\nname = 'a'", "keys must be tables, one [[keys]] for each key"),
        ("[[key]]\nname = 'a'", "unknown table 'key'; did you mean keys? Known: keys"),
        ("people = 1", "unknown table 'people'; known: keys"),
        ("[[keys]]\nname = 1", "[[keys]] 1: name must be 1 to 64 letters"),
        ("[[keys]]\nname = '/SECRET'", "[[keys]] 1: name must be 1 to 64 letters"),
        ("[[keys]]\nkey = 'SECRET'", "[[keys]] 1: it needs a name"),
        ("[[keys]]\nname = 'a'", "[[keys]] 1 (a): give either key or sha256"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\nsha256 = '" + "0" * 64 + "'", "[[keys]] 1 (a): give either"),
        ("[[keys]]\nname = 'a'\nkey = ''", "[[keys]] 1 (a): key must be a text that is not empty"),
        ("[[keys]]\nname = 'a'\nsha256 = 'SECRET'", "[[keys]] 1 (a): sha256 must be 64 hexadecimal digits"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\nscopes = ['root']", "(a): scopes must be a list of 'inference'"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\nscopes = []", "(a): scopes must be a list of 'inference'"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\nservice_class = 1", "(a): service_class must be a text"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\nlimits = 'SECRET'", "(a): limits must be a table"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\nscope = 1", "(a): unknown field 'scope'; did you mean scopes? Known: "),
        (
            f"[[keys]]\nname = 'a'\nsha256 = '{'0' * 64}'\n[[keys]]\nname = 'b'\nkey = 'SECRET'\nlimits = {{x = 1}}",
            "[[keys]] 2 (b): unknown field 'limits.x'; known: requests_per_minute, tokens_per_minute, concurrent_req",
        ),
        (
            "[[keys]]\nname = 'a'\nkey = 'SECRET'\nlimits = {token_per_minute = 1}",
            "(a): unknown field 'limits.token_per_minute'; did you mean tokens_per_minute? Known: ",
        ),
        (
            "[[keys]]\nname = 'a'\nkey = 'SECRET'\nlimits = {requests_per_minute = -1}",
            "(a): limits.requests_per_minute must be a whole number from 0",
        ),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\n" * 2, "two keys have the name 'a'"),
        ("[[keys]]\nname = 'a'\nkey = 'SECRET'\n[[keys]]\nname = 'b'\nkey = 'SECRET'", "'a' and 'b' are the same key"),
        ("[[keys]]\nname = 'a\nkey = 'SECRET'", "line 2, column"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(UsageError) as raised:
        keys_of(path)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
    assert "SECRET" not in str(raised.value)


def test_files_that_others_can_read_or_write(key_file: Path, tmp_path: Path) -> None:
    key_file.chmod(0o644)
    with pytest.raises(UsageError, match=r"can be read by everybody: chmod 600 .*, or give their sha256"):
        keys_of(key_file)
    key_file.chmod(0o640)
    assert len(keys_of(key_file)) == 2
    hashed = f'[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"'
    assert len(keys_of(write(tmp_path / "hashed.toml", hashed, 0o644))) == 1
    with pytest.raises(UsageError, match="written by everybody"):
        keys_of(write(tmp_path / "hashed.toml", hashed, 0o646))
    with pytest.raises(UsageError, match="No such file"):
        keys_of(tmp_path / "none.toml")


def test_reload_keeps_the_old_keys_if_the_new_are_broken(key_file: Path) -> None:
    keys = keys_of(key_file)
    write(key_file, "[[keys]]\nname = 'carol'\nkey = 'sk-carol'\nscopes = ['nothing']\n")
    with capture_logs() as logs:
        assert not keys.reload()
    [line] = logs
    assert line["log_level"] == "error"
    assert "those before stay in force" in line["event"]
    assert "[[keys]] 1 (carol): scopes must be a list of" in line["error"]
    assert "sk-" not in repr(logs)
    assert keys.find("sk-alice") is not None
    write(key_file, "[[keys]]\nname = 'carol'\nkey = 'sk-carol'\n")
    with capture_logs() as logs:
        assert keys.reload()
    assert (logs[0]["event"], logs[0]["num_keys"]) == ("API keys reloaded", 1)
    assert keys.find("sk-alice") is None
    assert keys.find("sk-carol") is not None


async def test_a_file_that_could_not_be_read_is_read_again_though_it_is_the_same(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_read = asyncio.Event()

    class WatchedDisk(FailingDisk):
        def read(self, path: Path) -> bytes:
            content = super().read(path)
            was_read.set()
            return content

    monkeypatch.setattr(api_keys, "POLL_SECONDS", 0.001)
    disk = WatchedDisk()
    keys = ApiKeys(real_system()._replace(disk=disk), ServerConfig(api_keys_file=str(key_file)))
    was_read.clear()
    disk.num_left = 3
    write(key_file, "[[keys]]\nname = 'carol'\nkey = 'sk-carol'\n")
    with capture_logs() as logs:
        watching = asyncio.create_task(keys.watch())
        async with asyncio.timeout(30):
            await was_read.wait()
        watching.cancel()
    assert keys.find("sk-carol") is not None
    assert [line["log_level"] for line in logs] == ["error", "info"]
    assert logs[0]["error"] == f"cannot read the API keys {key_file}: Input/output error"


def test_a_file_that_changes_is_read_again(
    start_server: Callable[..., RunningServer], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "POLL_SECONDS", 0.001)
    server = start_server(api_keys_file=str(key_file))

    def status(key: str) -> int:
        return server.request("GET", "/v1/models", headers=bearer(key)).status

    assert (status("sk-alice"), status("sk-carol")) == (200, 401)
    write(key_file, "[[keys]]\nname = 'carol'\nkey = 'sk-carol'\n")
    wait_until(lambda: status("sk-carol") == 200)
    assert status("sk-alice") == 401
    # A file that is gone for a moment changes nothing.
    with capture_logs() as logs:
        os.rename(key_file, key_file.with_suffix(".away"))
        wait_until(lambda: any("not reloaded" in line["event"] for line in list(logs)))
    assert status("sk-carol") == 200
    write(key_file, TWO_KEYS)
    wait_until(lambda: status("sk-alice") == 200)


def test_scopes(start_server: Callable[..., RunningServer], key_file: Path) -> None:
    server = start_server(api_keys_file=str(key_file))
    assert server.request("GET", "/v1/models", headers=bearer("sk-alice")).status == 200
    refused = server.request("GET", "/v1/models", headers=bearer("sk-ops"))
    assert_error(refused, 403, INVALID, None, "missing_scope", message="'inference'")
    for path in ("/health", "/metrics", "/version", "/openapi.json"):
        assert server.request("GET", path).status == 200
    for path in ("/tokenize", "/nowhere"):
        assert_error(server.request("GET", path), 401, INVALID)


def test_the_log_names_the_key_but_never_shows_it(start_server: Callable[..., RunningServer], key_file: Path) -> None:
    server = start_server(api_keys_file=str(key_file))
    with capture_logs() as logs:
        server.post("/v1/completions", {"model": "test", "prompt": "x"}, bearer("sk-alice"))
        server.post("/v1/completions", {"model": "test", "prompt": "x"}, bearer("sk-wrong"))
        wait_until(lambda: len(logs) == 2)
    assert [(line["status"], line.get("key")) for line in logs] == [(200, "alice"), (401, None)]
    assert "sk-" not in repr(logs)


def test_a_file_that_goes_while_it_is_read_is_not_used(tmp_path: Path) -> None:
    class VanishingDisk(SystemDisk):
        def read(self, path: Path) -> bytes:
            content = super().read(path)
            path.unlink()
            return content

    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]\nname = 'a'\nkey = 'SECRET'\n")
    with pytest.raises(UsageError, match="was removed while it was read"):
        read_key_file(path, VanishingDisk())
