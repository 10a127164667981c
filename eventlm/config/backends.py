"""Backends as people write them: `http://HOST:PORT,key=KEY,max_concurrency=N`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta, Struct, structs

from eventlm.config.secrets import REDACTED, hide_keys
from eventlm.errors import UsageError
from eventlm.system.disk import SYSTEM_DISK, Disk

BackendKind = Literal["vllm", "sglang", "llamacpp", "ollama", "openai", "eventlm"]

#: What a spec may say beside where the backend is.
BACKEND_KEYS = ("key", "key_env", "key_file", "kind", "model", "max_concurrency", "weight", "ca_file", "verify")
_DNS, _FILE = "dns:", "file:"
#: In a header of HTTP there is nothing else.
_KEY = re.compile(r"[!-~]+")


class BackendSpec(Struct, frozen=True, kw_only=True):
    """One other server. url: without a path behind the API's root, such as `http://10.0.0.2:8000`. key: what it wants
    as a bearer token; shown nowhere. kind: empty: found by asking. model: what it calls the model; empty: the only one
    that it serves. max_concurrency: most requests there at once; 0: what it says, else found by trying.
    weight: its share of the load against others'. ca_file, verify: how its certificate is checked.
    """

    url: str
    key: str = ""
    kind: BackendKind | None = None
    model: str = ""
    max_concurrency: Annotated[int, Meta(ge=0, le=1_000_000, description="an integer from 1 to 1000000")] = 0
    weight: Annotated[float, Meta(gt=0, le=1e6, description="a number above 0 and up to 1000000")] = 1.0
    ca_file: str = ""
    verify: Annotated[bool, Meta(description="true or false")] = True

    @property
    def name(self) -> str:
        """Host and port, with the path if there is one."""
        return self.url.partition("://")[2]

    def __repr__(self) -> str:
        """Without the key."""
        shown = structs.replace(self, key=REDACTED if self.key else "")
        return f"BackendSpec({structs.asdict(shown)})"


class DnsBackends(Struct, frozen=True):
    """All addresses that a host's name resolves to, at one port. common: what is said of each, without a url."""

    host: str
    port: int
    common: BackendSpec

    def at(self, address: str) -> BackendSpec:
        """The backend at one of the addresses."""
        host = f"[{address}]" if ":" in address else address
        return structs.replace(self.common, url=f"http://{host}:{self.port}")


class FileBackends(Struct, frozen=True):
    """Those that a file lists, one spec a line. common: what holds for lines that do not say otherwise."""

    path: str
    common: BackendSpec


def parse_backend(
    text: str,
    *,
    common: BackendSpec | None = None,
    environment: Mapping[str, str] | None = None,
    disk: Disk = SYSTEM_DISK,
) -> BackendSpec | DnsBackends | FileBackends:
    """What a spec means: `URL`, `dns:HOST:PORT` or `file:PATH`, each with `,KEY=VALUE,...`.

    common: what holds where it does not say otherwise. environment: `os.environ` if not given. disk: has its key's
    file. Raises UsageError in one line, which quotes the spec without its key.
    """
    where = f"--backend {hide_keys(text)}"
    place, *parts = (part.strip() for part in text.split(","))
    common = structs.replace(common or BackendSpec(url=""), **_values(parts, where, environment, disk))
    if place.startswith(_DNS):
        return _dns_backends(place.removeprefix(_DNS), common, where)
    if place.startswith(_FILE):
        path = place.removeprefix(_FILE)
        if not path:
            raise UsageError(f"{where}: it names no file; write file:PATH")
        return FileBackends(path, common)
    url = _root_url(place, where)
    if common.ca_file and not url.startswith("https:"):
        raise UsageError(f"{where}: ca_file is for a server with TLS, and this is no https: URL")
    return structs.replace(common, url=url)


def read_backends_file(backends: FileBackends, disk: Disk = SYSTEM_DISK) -> list[BackendSpec]:
    """The servers that a file lists now; `#` begins a comment. Raises UsageError, with the line."""
    try:
        lines = disk.read(Path(backends.path)).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--backend file:{backends.path}: cannot read it: {_reason(error)}") from error
    found: list[BackendSpec] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{backends.path}, line {number}"
        try:
            spec = parse_backend(text, common=backends.common, disk=disk)
        except UsageError as error:
            raise UsageError(f"{where}: {str(error).removeprefix('--backend ')}") from error
        if not isinstance(spec, BackendSpec):
            raise UsageError(f"{where}: {hide_keys(text)}: a file lists URLs; give this with --backend")
        if any(each.url == spec.url for each in found):
            raise UsageError(f"{where}: {spec.url} appears twice")
        found.append(spec)
    return found


def _values(parts: list[str], where: str, environment: Mapping[str, str] | None, disk: Disk) -> dict[str, Any]:
    """Fields of BackendSpec that `KEY=VALUE` parts set."""
    texts: dict[str, str] = {}
    for part in parts:
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not value or hide_keys(part) == REDACTED:
            raise UsageError(f"{where}: after the address come KEY=VALUE, with keys {', '.join(BACKEND_KEYS)}")
        if key not in BACKEND_KEYS:
            raise UsageError(f"{where}: unknown key {key!r}; known: {', '.join(BACKEND_KEYS)}")
        if key in texts:
            raise UsageError(f"{where}: it gives {key} twice")
        texts[key] = value
    key_from = [key for key in ("key", "key_env", "key_file") if key in texts]
    if len(key_from) > 1:
        raise UsageError(f"{where}: it gives {' and '.join(key_from)}; one is enough")
    found: dict[str, Any] = {"key": _key(texts, where, environment, disk)} if key_from else {}
    for field in structs.fields(BackendSpec):
        if field.name not in texts or field.name == "key":
            continue
        try:
            found[field.name] = msgspec.convert(texts[field.name], field.type, strict=False)
        except msgspec.ValidationError:
            raise UsageError(f"{where}: {field.name}={texts[field.name]}: must be {_allowed(field.type)}") from None
    if found.get("max_concurrency") == 0:
        raise UsageError(f"{where}: max_concurrency=0: must be an integer from 1; leave it out if it is not known")
    if "ca_file" in found:
        _check_ca_file(found["ca_file"], where, is_checked=found.get("verify", True))
    return found


def _allowed(type_: Any) -> str:
    metas = [each.description for each in get_args(type_) if isinstance(each, Meta) and each.description]
    return metas[0] if metas else f"one of {', '.join(get_args(BackendKind))}"


def _key(texts: Mapping[str, str], where: str, environment: Mapping[str, str] | None, disk: Disk) -> str:
    key = texts.get("key", "")
    if "key_env" in texts:
        name = texts["key_env"]
        key = (os.environ if environment is None else environment).get(name, "").strip()
        if not key:
            raise UsageError(f"{where}: the variable {name} is not set; put the backend's key into it")
    if "key_file" in texts:
        try:
            key = disk.read(Path(texts["key_file"])).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{where}: cannot read {texts['key_file']}: {_reason(error)}") from error
        if not key:
            raise UsageError(f"{where}: {texts['key_file']} is empty; put the backend's key into it")
    if key == REDACTED:
        raise UsageError(f"{where}: {REDACTED} stands for a key that is not shown; give the key, key_env or key_file")
    if not _KEY.fullmatch(key):
        raise UsageError(f"{where}: its key has characters that HTTP does not allow: a key is one word of ASCII")
    return key


def _check_ca_file(path: str, where: str, *, is_checked: bool) -> None:
    if not is_checked:
        raise UsageError(f"{where}: with verify=false no certificate is checked; leave ca_file or verify out")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(f"{where}: cannot read {path}: {_reason(error)}") from error


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text in UTF-8"


def _dns_backends(place: str, common: BackendSpec, where: str) -> DnsBackends:
    url = _split(f"http://{place}", where)
    if not url.hostname or not url.port or url.netloc != place:
        raise UsageError(f"{where}: it must be dns:HOST:PORT, such as dns:llm.internal:8000")
    return DnsBackends(url.hostname, url.port, common)


def _root_url(place: str, where: str) -> str:
    """The URL without the path of the API's root."""
    url = _split(place, where)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"{where}: it must be a URL such as http://10.0.0.2:8000, dns:HOST:PORT or file:PATH")
    if "@" in url.netloc:
        raise UsageError(f"{where}: a URL has no user here; give the API key with key=, key_env= or key_file=")
    if url.query or url.fragment:
        raise UsageError(f"{where}: the URL ends with the API's root; leave out what comes after ? or #")
    path = url.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{url.scheme}://{url.netloc.lower()}{path}"


def _split(url: str, where: str) -> SplitResult:
    try:
        found = urlsplit(url)
        _ = found.port
    except ValueError:
        raise UsageError(f"{where}: this is no URL; write one such as http://10.0.0.2:8000") from None
    if any(letter.isspace() or not letter.isprintable() for letter in url):
        raise UsageError(f"{where}: a URL has no spaces; write one such as http://10.0.0.2:8000")
    return found
