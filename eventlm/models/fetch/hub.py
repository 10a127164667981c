"""Models of the Hugging Face hub by their repository id, in the hub's own cache and under its rules.

`hub_snapshot.py` does the work, in a child process.
"""

from __future__ import annotations

import re
from pathlib import Path

from eventlm.errors import ExitCode, PullError
from eventlm.system.child_process import last_line, run_child

_SCRIPT = Path(__file__).with_name("hub_snapshot.py")
#: The hub's own rule for names, and what names one of the GGUF files; what has another form is a path.
_REPO_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?::([\w.-]+))?", re.ASCII)


def is_repo_id(text: str) -> bool:
    """Whether `text` has the form ORG/NAME or ORG/NAME:QUANTIZATION."""
    return _REPO_ID.fullmatch(text) is not None


def pull_repo(repo_id: str, revision: str = "", *, with_weights: bool = True, may_fetch: bool = True) -> Path:
    """The snapshot folder of a repository; files that are not in the cache are fetched, with progress on stderr.

    Of ORG/NAME:QUANTIZATION it is the GGUF file of that quantization, or the first of its parts, which are all that is
    fetched.

    `revision` is a branch, a tag or a commit; empty is the main branch. Only config, tokenizer, chat template and
    safetensors are fetched; `with_weights=False` leaves the last out and needs a tokenizer only. Without a network,
    with HF_HUB_OFFLINE=1, or without `may_fetch`, the cache must have all of them. Raises PullError.
    """
    matched = _REPO_ID.fullmatch(repo_id)
    name, quantization = matched.groups() if matched else (repo_id, None)
    options = ["--no-weights"] * (not with_weights) + ["--cached-only"] * (not may_fetch)
    options += ["--gguf", quantization] if quantization else []
    arguments = [*options, name, *([revision] if revision else [])]
    code, output, errors = run_child(_SCRIPT, *arguments, shows_errors=True)
    line = output.removesuffix("\n")
    if code == 0:
        return Path(line)
    exit_code = ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED
    raise PullError(line or f"fetching {repo_id} failed: {last_line(errors, code)}", exit_code=exit_code)
