"""Fetch the files of one model repository with huggingface_hub:

    hub_snapshot.py [--no-weights] [--cached-only] [--gguf QUANTIZATION] ORG/NAME [REVISION]

Runs as a child process, by path, so that its caller never loads an HTTP stack and Ctrl-C need not wait for download
threads. It imports nothing of eventlm. Progress goes to stderr, the folder, the GGUF file or the line that says what is
wrong to stdout. It exits with 1 where the same call may succeed later, with 2 where it needs another name, revision or
token.

Where files go and which token is sent is up to the library: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import argparse
import errno
import fnmatch
import glob
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import tqdm as hub_bar

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
#: All files of a repository that are read, except its weights. Code is never fetched or run.
DESCRIPTION_FILES = (
    "config.json",
    "quantize_config.json",
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
)
SHOW_AFTER_SECONDS = 0.5
#: What is left of a file's name that says which part of a model it is; and of one that is no model of text.
_PART, _OTHER = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE), "*mmproj*"
#: How many names an error lists.
_MOST_NAMES = 40


class SeveralError(Exception):
    """Several of a repository's GGUF files are meant. Its text names them."""


class NoGgufError(FileNotFoundError):
    """None of a repository's GGUF files is meant. Its text says which it has."""


class Bar(hub_bar):
    """The library's progress bar, hidden for cached files, with rare updates if stderr is not a terminal."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("delay", SHOW_AFTER_SECONDS)
        keywords.setdefault("mininterval", 0.1 if sys.stderr.isatty() else 5.0)
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]


def fetch(repo_id: str, revision: str | None, *, with_weights: bool, cached_only: bool) -> str:
    """The folder of the snapshot with every file that is needed; what is cached is not fetched again.

    The weights are those that the index names, else the single file; without them only a tokenizer is needed. Raises
    what huggingface_hub raises, and FileNotFoundError for a repository without config.json, safetensors or tokenizer.
    """

    def snapshot(revision: str | None, names: Iterable[str]) -> Path:
        return Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=list(names), local_files_only=cached_only, tqdm_class=Bar
            )
        )

    def check(names: Iterable[str]) -> None:
        for name in names:
            if not (folder / name).exists():
                raise FileNotFoundError(name)

    folder = snapshot(revision, DESCRIPTION_FILES)
    check(["config.json"] if with_weights else [TOKENIZER_FILE])
    if with_weights:
        weights = [SINGLE_FILE]
        if (folder / INDEX_FILE).exists():
            weights = sorted(set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values()))
        if any(not (folder / name).exists() for name in weights):
            # By its commit, which is the folder's name: a branch may have moved meanwhile.
            snapshot(folder.name, weights)
        check(weights)
    return str(folder)


def fetch_gguf(repo_id: str, revision: str | None, quantization: str, *, cached_only: bool) -> str:
    """The GGUF file of a quantization, or the first of its parts; what is cached is not fetched again.

    Raises what huggingface_hub raises, SeveralError and NoGgufError.
    """

    unreachable: Exception | None = None
    if not cached_only:
        try:
            info = HfApi().model_info(repo_id, revision=revision or constants.DEFAULT_REVISION)
        except errors.HfHubHTTPError:
            raise
        except Exception as error:
            unreachable = error
        else:
            chosen = choose_gguf([file.rfilename for file in info.siblings or []], quantization)
            patterns = [glob.escape(name) for name in chosen]
            return str(
                Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, tqdm_class=Bar), chosen[0])
            )
    folder = _cached_snapshot(repo_id, revision)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        return str(folder / choose_gguf(names, quantization)[0])
    except NoGgufError as error:
        raise errors.LocalEntryNotFoundError(str(error)) if unreachable else error from unreachable


def choose_gguf(names: Iterable[str], quantization: str) -> list[str]:
    """Of a repository's files the GGUF file in whose name a quantization stands, whatever its case, with all its parts.

    One where it stands alone, as F16 does not in BF16, goes before others. Raises SeveralError and NoGgufError.
    """
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        if fnmatch.fnmatch(name.lower(), "*.gguf") and not fnmatch.fnmatch(name.lower(), _OTHER):
            files.setdefault(_PART.sub("", name), []).append(name)
    wanted = re.escape(quantization.lower())
    for pattern in (rf"(?<![a-z0-9_]){wanted}(?![a-z0-9_])", wanted):
        found = [name for name in files if re.search(pattern, name.removesuffix(".gguf").lower())]
        if len(found) == 1:
            return files[found[0]]
        if found:
            raise SeveralError(f"several GGUF files of {quantization}: {_listed(found)}; say more of the name")
    if not files:
        raise NoGgufError("no GGUF file; leave the quantization out")
    raise NoGgufError(f"no GGUF file of {quantization}; it has {_listed(files)}")


def _cached_snapshot(repo_id: str, revision: str | None) -> Path:
    """The folder of a snapshot in the cache, which may lack files, or not be there."""
    repository = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="model"))
    revision = revision or constants.DEFAULT_REVISION
    reference = repository / "refs" / revision
    return repository / "snapshots" / (reference.read_text() if reference.is_file() else revision)


def _listed(names: Iterable[str]) -> str:
    first, *rest = names
    shown = [first, *rest[: _MOST_NAMES - 1]]
    more = f" and {len(rest) + 1 - len(shown)} more" if len(rest) >= _MOST_NAMES else ""
    return ", ".join(shown) + more


def explain(
    error: Exception, repo_id: str, revision: str | None, quantization: str, *, cached_only: bool
) -> tuple[int, str]:
    """The exit status for an error of fetching, and the line that says what is wrong, where, and what to do."""
    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    name = f"{repo_id}:{quantization}" if quantization else repo_id
    again = f"`eventlm pull {name}{f' --revision {revision}' if revision else ''}`"
    at_revision = f"{repo_id} at revision {revision!r}" if revision else repo_id
    incomplete = f"{at_revision} is not complete in the cache {cache}"
    log_in = "set HF_TOKEN, or log in with `hf auth login`"
    cause = error.__cause__ or error
    number = error.errno if isinstance(error, OSError) else None
    is_missing = isinstance(error, FileNotFoundError) and not number
    if isinstance(error, SeveralError) or (isinstance(error, NoGgufError) and not cached_only):
        return 2, f"{at_revision} has {error}"
    if isinstance(error, errors.GatedRepoError):
        return 2, f"{repo_id} is gated: ask for access at {endpoint}/{repo_id}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return 2, (
            f"{endpoint} has no repository {repo_id}, or does not show it without the right token: check the name; "
            f"if it is private, {log_in}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return 2, f"{repo_id} has no revision {revision!r}: leave --revision out for its main branch, or name a tag"
    if isinstance(error, errors.HFValidationError):
        return 2, f"{repo_id} is not the name of a repository, which is ORG/NAME"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return 1, f"no space is left in the cache {cache}: free some there, or set HF_HOME to another folder"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return 1, f"cannot write to the cache {cache}: make it writable, or set HF_HOME to another folder"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        status = error.response.status_code
        return 2, f"{endpoint} refuses access to {repo_id} (HTTP {status}): check the token; {log_in}"
    if cached_only and is_missing and str(error) != "config.json":
        if constants.HF_HUB_OFFLINE:
            return 1, f"{incomplete} and HF_HUB_OFFLINE forbids fetching it: unset HF_HUB_OFFLINE and run {again} once"
        return 1, f"{incomplete}; {again} fetches it"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.HfHubHTTPError)):
        reason = _reason(cause)
        return (
            1,
            f"{incomplete} and {endpoint} cannot be reached ({reason}): connect to the network once and run {again}",
        )
    if is_missing and str(error) == TOKENIZER_FILE:
        return 2, f"{at_revision} holds no tokenizer.json: choose a repository that does"
    if is_missing:
        return 2, f"{at_revision} holds no {error}: choose a repository with a Hugging Face checkpoint in safetensors"
    return 1, f"fetching {at_revision} from {endpoint} failed: {_reason(cause)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, errors.HfHubHTTPError):
        return f"HTTP {error.response.status_code}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> int:
    """Print the result and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-weights", action="store_true")
    parser.add_argument("--cached-only", action="store_true")
    parser.add_argument("--gguf", default="", metavar="QUANTIZATION")
    parser.add_argument("repo_id")
    parser.add_argument("revision", nargs="?")
    given = parser.parse_args()
    logging.set_verbosity_error()
    # Some versions ask the hub which files a commit has, offline or not, unless told to use the cache alone.
    cached_only = given.cached_only or constants.HF_HUB_OFFLINE
    try:
        code = 0
        if given.gguf:
            line = fetch_gguf(given.repo_id, given.revision, given.gguf, cached_only=cached_only)
        else:
            line = fetch(given.repo_id, given.revision, with_weights=not given.no_weights, cached_only=cached_only)
    except Exception as error:
        code, line = explain(error, given.repo_id, given.revision, given.gguf, cached_only=cached_only)
    print(line)
    return code


if __name__ == "__main__":
    sys.exit(main())
