"""API keys, from a TOML file, the configuration, or both.

    [[keys]]
    name = "alice"                         # in the log
    sha256 = "5e88...9d"                   # of the key; or the key itself: key = "sk-..."
    scopes = ["inference"]                 # or "admin", or both
    service_class = "interactive"          # of its requests
    limits = { requests_per_minute = 60, tokens_per_minute = 100_000, concurrent_requests = 8 }

Keys are looked up by a digest under a secret of this process, so the time of a look-up reveals nothing of any key and
does not grow with their number. A changed file takes effect at once; a broken one changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import stat
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
from aiohttp import web
from msgspec import Meta, Struct

from eventlm.config import ServerConfig
from eventlm.config.load import read_toml
from eventlm.config.options import did_you_mean
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.errors import UsageError
from eventlm.system.disk import SYSTEM_DISK, Disk, FileStatus
from eventlm.system.system import System

Scope = Literal["inference", "admin"]
_log = structlog.get_logger("eventlm.server")

#: How often a file of keys is looked at.
POLL_SECONDS = 2.0
#: Name of the one key of --api-key and EVENTLM_API_KEY.
CONFIGURED_NAME = "default"
_NAME = re.compile(r"^[A-Za-z0-9._@-]{1,64}$")
_OTHERS = stat.S_IROTH | stat.S_IWOTH


class Principal(Struct, frozen=True, kw_only=True):
    """The holder of a key. Of this, only the name is logged.

    name: of the key in the configuration; empty if no key is required. owner: identifies the key where things belong to
    it (streams, explanations, prefix caches), without revealing anything of it. service_class: of its requests.
    """

    name: str = ""
    owner: str = ""
    scopes: tuple[Scope, ...] = ("inference",)
    service_class: str = ""
    limits: RateLimits = NO_LIMITS


#: If no key is required. Admin endpoints always require one.
ANYBODY = Principal()
PRINCIPAL = web.RequestKey("principal", Principal)


class KeyEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[keys]]` table of the file: either `key` or `sha256` (64 hex digits of it)."""

    name: Annotated[str, Meta(pattern=_NAME.pattern)]
    key: Annotated[str, Meta(min_length=1)] = ""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] = ""
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = ("inference",)
    service_class: str = ""
    limits: RateLimits = NO_LIMITS


#: Messages for fields that are wrong.
_MUST_BE = {
    "name": "must be 1 to 64 letters, digits, dots, _, @ or -",
    "key": "must be a text that is not empty",
    "sha256": "must be 64 hexadecimal digits: printf %s KEY | sha256sum",
    "scopes": "must be a list of 'inference', 'admin' or both",
    "service_class": "must be a text",
    "limits": "must be a table",
}
_LIMIT_MUST_BE = "must be a whole number from 0 (no limit) to 1000000000000"
_PATH = re.compile(r"`\$\.(?P<field>\w+)(\.(?P<limit>\w+))?")


class ApiKeys:
    """The keys in force. `service_classes` are those that keys name, sorted. Raises UsageError for an unusable file."""

    def __init__(self, system: System, config: ServerConfig) -> None:
        self._path = Path(config.api_keys_file) if config.api_keys_file else None
        self._configured = _principals([KeyEntry(name=CONFIGURED_NAME, key=config.api_key)]) if config.api_key else {}
        self._secret = system.chance.token_bytes(32)
        self._disk = system.disk
        self._version = self._status()
        self._by_digest = self._load()
        #: Why it could not be read again.
        self._problem = ""

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, key: str) -> Principal | None:
        """The holder of a key; None for an unknown key."""
        return self._by_digest.get(self._digest(sha256(key.encode("utf-8", "surrogateescape")).digest()))

    def holder(self, owner: str) -> Principal | None:
        """The principal with this owner, as it is now; without any keys that is anybody."""
        if not self:
            return ANYBODY if owner == ANYBODY.owner else None
        return next((principal for principal in self._by_digest.values() if principal.owner == owner), None)

    def has_scope(self, scope: Scope) -> bool:
        """Whether any key has this scope."""
        return any(scope in principal.scopes for principal in self._by_digest.values())

    def reload(self) -> bool:
        """Read the file again. If it cannot be used, the keys stay as they are and the log says why."""
        self._problem = ""
        return self._reload()

    def _reload(self) -> bool:
        """The same, but the log does not say twice in a row why."""
        version = self._status()
        try:
            self._by_digest = self._load()
        except UsageError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("the API keys were not reloaded, those before stay in force", error=self._problem)
            return False
        self._version, self._problem = version, ""
        if self._path is not None:
            _log.info("API keys reloaded", file=str(self._path), num_keys=len(self))
        return True

    async def watch(self) -> None:
        """Reload whenever the file changes, and until it could be read; runs until it is cancelled."""
        while self._path is not None:
            await asyncio.sleep(POLL_SECONDS)
            if self._status() != self._version:
                self._reload()
            else:
                # If it becomes unusable again, that is said again.
                self._problem = ""

    def _status(self) -> FileStatus | None:
        """Identifies a version of the file without reading it."""
        return None if self._path is None else self._disk.status(self._path)

    def _load(self) -> dict[bytes, Principal]:
        principals = dict(self._configured)
        if self._path is not None:
            principals |= _principals(read_key_file(self._path, self._disk))
        self.service_classes = sorted({principal.service_class for principal in principals.values()} - {""})
        return {self._digest(digest): principal for digest, principal in principals.items()}

    def _digest(self, key_sha256: bytes) -> bytes:
        return blake2b(key_sha256, digest_size=32, key=self._secret).digest()


def read_key_file(path: Path, disk: Disk = SYSTEM_DISK) -> list[KeyEntry]:
    """The entries of a file of keys. Raises UsageError, which never shows a key."""
    tables = read_toml(path, what="the API keys", disk=disk)
    status = disk.status(path)
    if status is None:
        raise UsageError(f"{path} was removed while it was read")
    if status.mode & stat.S_IWOTH:
        raise UsageError(f"{path} can be written by everybody: chmod 600 {path}")
    for name in tables:
        if name != "keys":
            raise UsageError(f"{path}: unknown table {name!r}{did_you_mean(name, ['keys'], listed_as='known')}")
    found = tables.get("keys")
    if not found:
        raise UsageError(f"{path} has no [[keys]] table: no client could use the server")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UsageError(f"{path}: keys must be tables, one [[keys]] for each key")
    entries = [_entry(f"{path}, [[keys]] {number}", table) for number, table in enumerate(found, start=1)]
    _check_unique(path, entries)
    if any(entry.key for entry in entries) and status.mode & _OTHERS:
        raise UsageError(f"{path} has keys in it and can be read by everybody: chmod 600 {path}, or give their sha256")
    return entries


def _entry(where: str, table: dict[str, Any]) -> KeyEntry:
    """One table. Errors show no values: one in the wrong field may be a key."""
    name = table.get("name")
    if isinstance(name, str) and _NAME.fullmatch(name):
        where = f"{where} ({name})"
    _check_fields(where, "", table, KeyEntry)
    if isinstance(table.get("limits"), dict):
        _check_fields(where, "limits.", table["limits"], RateLimits)
    if name is None:
        raise UsageError(f"{where}: it needs a name")
    try:
        entry = msgspec.convert(table, KeyEntry)
    except msgspec.ValidationError as error:
        path = _PATH.search(str(error))
        assert path is not None
        if path["limit"]:
            raise UsageError(f"{where}: limits.{path['limit']} {_LIMIT_MUST_BE}") from None
        raise UsageError(f"{where}: {path['field']} {_MUST_BE[path['field']]}") from None
    if bool(entry.key) == bool(entry.sha256):
        raise UsageError(f"{where}: give either key or sha256")
    return entry


def _check_fields(where: str, prefix: str, table: dict[str, Any], struct: type[Struct]) -> None:
    known = struct.__struct_fields__
    for name in table:
        if name not in known:
            hint = did_you_mean(name, known, listed_as="known")
            raise UsageError(f"{where}: unknown field {prefix + name!r}{hint}")


def _check_unique(path: Path, entries: list[KeyEntry]) -> None:
    names: set[str] = set()
    name_of: dict[bytes, str] = {}
    for entry in entries:
        if entry.name in names:
            raise UsageError(f"{path}: two keys have the name {entry.name!r}")
        other = name_of.setdefault(_sha256_of(entry), entry.name)
        if other != entry.name:
            raise UsageError(f"{path}: {other!r} and {entry.name!r} are the same key")
        names.add(entry.name)


def _principals(entries: list[KeyEntry]) -> dict[bytes, Principal]:
    """By the SHA-256 of each key."""
    found = {}
    for entry in entries:
        digest = _sha256_of(entry)
        owner = blake2b(entry.name.encode(), digest_size=16, key=digest).hexdigest()
        found[digest] = Principal(
            name=entry.name,
            owner=owner,
            scopes=entry.scopes,
            service_class=entry.service_class,
            limits=entry.limits,
        )
    return found


def _sha256_of(entry: KeyEntry) -> bytes:
    return bytes.fromhex(entry.sha256) if entry.sha256 else sha256(entry.key.encode()).digest()
