"""Fetch the files of one model repository with huggingface_hub: `hub_snapshot.py [--no-weights] ORG/NAME [REVISION]`.

Runs as a child process of its own, by path, so that its caller never loads an HTTP stack and Ctrl-C need not wait for
download threads. It imports nothing of eventlm. Progress goes to stderr, one JSON object to stdout: `{"folder": ...}`,
or `{"problem": ..., "detail": ..., "endpoint": ..., "cache": ...}` with a problem that `eventlm.models.hub` has words
for.

Where files go and which token is sent is the library's business: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import tqdm as hub_bar

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
#: All that is read of a repository besides its weights. Code is not: nothing of it is ever run.
DESCRIPTION_FILES = (
    "config.json",
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


class Bar(hub_bar):
    """The library's progress bar, not shown for what is cached already, and rare lines where nobody watches."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("delay", SHOW_AFTER_SECONDS)
        keywords.setdefault("mininterval", 0.1 if sys.stderr.isatty() else 5.0)
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]


def fetch(repo_id: str, revision: str | None, *, with_weights: bool) -> str:
    """The folder of the snapshot with every file that is needed; what is cached is not fetched again.

    The weights are those that the index names, else the single file; without them only a tokenizer is needed. Raises
    what huggingface_hub raises, and FileNotFoundError for a repository without config.json, safetensors or tokenizer.
    """
    folder = _snapshot(repo_id, revision, DESCRIPTION_FILES)
    if not with_weights:
        if not (folder / TOKENIZER_FILE).exists():
            raise FileNotFoundError(TOKENIZER_FILE)
        return str(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError("config.json")
    weights = [SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        weight_map = json.loads((folder / INDEX_FILE).read_bytes())["weight_map"]
        weights = sorted(set(weight_map.values()))
    if any(not (folder / name).exists() for name in weights):
        # By its commit, which is the folder's name: a branch may have moved meanwhile.
        _snapshot(repo_id, folder.name, weights)
    missing = [name for name in weights if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(missing[0])
    return str(folder)


def _snapshot(repo_id: str, revision: str | None, names: Iterable[str]) -> Path:
    # Some versions ask the hub which files a commit has, offline or not, unless they are to look into the cache alone.
    local_only = constants.HF_HUB_OFFLINE
    patterns = list(names)
    return Path(
        snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, local_files_only=local_only, tqdm_class=Bar
        )
    )


def problem_of(error: Exception) -> str:
    """Which of the known problems an error is; empty for any other."""
    cause = error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        return "gated"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no repository"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no revision"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk full"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "not writable"
    if isinstance(error, errors.HFValidationError):
        return "bad name"
    if isinstance(error, errors.HfHubHTTPError):
        return "refused" if error.response.status_code in (401, 403) else "unreachable"
    if isinstance(cause, errors.OfflineModeIsEnabled) or (
        isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE
    ):
        return "offline"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "unreachable"
    if isinstance(error, FileNotFoundError) and not error.errno:
        return "no tokenizer" if str(error) == TOKENIZER_FILE else "no safetensors"
    return ""


def detail_of(error: Exception) -> str:
    """What happened, in the words of whoever saw it first."""
    cause = error.__cause__ or error
    if isinstance(cause, errors.HfHubHTTPError):
        return f"HTTP {cause.response.status_code}"
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def main(*arguments: str) -> None:
    """Print the result."""
    repo_id, *revision = [argument for argument in arguments if argument != "--no-weights"]
    with_weights = "--no-weights" not in arguments
    logging.set_verbosity_error()
    result: dict[str, str]
    try:
        result = {"folder": fetch(repo_id, revision[0] if revision else None, with_weights=with_weights)}
    except Exception as error:
        if constants.HF_HUB_OFFLINE and isinstance(error, FileNotFoundError) and str(error) != "config.json":
            problem = "offline"
        else:
            problem = problem_of(error)
        result = {"problem": problem, "detail": detail_of(error)}
        result |= {"endpoint": constants.ENDPOINT, "cache": constants.HF_HUB_CACHE}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
