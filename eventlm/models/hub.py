"""Models of the Hugging Face hub by their repository id, in the hub's own cache and under its rules.

The work is done by `hub_snapshot.py` in a child process; here its result becomes a folder or a line that says what to
do.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from eventlm.errors import ExitCode, PullError
from eventlm.models.child_process import last_line, run_child, script_command

_SCRIPT = Path(__file__).with_name("hub_snapshot.py")
#: The hub's own rule for names; what has another form is a path.
_REPO_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
#: Problems that stay until another name, revision or token is given.
_PERMANENT = frozenset(
    {"no repository", "gated", "refused", "no revision", "no safetensors", "no tokenizer", "bad name"}
)


class _Result(Struct, frozen=True):
    """What the child reports: a folder, or a problem and where it met it."""

    folder: str = ""
    problem: str = ""
    detail: str = ""
    endpoint: str = ""
    cache: str = ""


def is_repo_id(text: str) -> bool:
    """Whether `text` has the form ORG/NAME."""
    return _REPO_ID.fullmatch(text) is not None


def pull_repo(repo_id: str, revision: str = "", *, with_weights: bool = True, may_fetch: bool = True) -> Path:
    """The snapshot folder of a repository; what is missing in the cache is fetched, with progress on stderr.

    `revision` is a branch, a tag or a commit; empty is the main branch. Only config, tokenizer, chat template and
    safetensors are fetched; `with_weights` False leaves the last out and asks for a tokenizer only. Without a network,
    or with HF_HUB_OFFLINE=1, or if it may not fetch, what is cached serves. Raises PullError.
    """
    options = [] if with_weights else ["--no-weights"]
    command = script_command(_SCRIPT, *options, repo_id, *([revision] if revision else []))
    environment = {} if may_fetch else {"HF_HUB_OFFLINE": "1"}
    code, output, errors = run_child(command, environment=environment, shows_errors=True)
    try:
        result = msgspec.json.decode(output, type=_Result)
    except msgspec.DecodeError:
        raise PullError(f"fetching {repo_id} failed: {last_line(errors, code)}") from None
    if result.folder:
        return Path(result.folder)
    exit_code = ExitCode.USAGE if result.problem in _PERMANENT else ExitCode.FAILED
    raise PullError(_message(repo_id, revision, result, may_fetch=may_fetch), exit_code=exit_code)


def _message(repo_id: str, revision: str, result: _Result, *, may_fetch: bool) -> str:
    """What is wrong, where, and what to do."""
    endpoint, cache = result.endpoint, result.cache
    again = f"`eventlm pull {repo_id}{f' --revision {revision}' if revision else ''}`"
    at_revision = f"{repo_id} at revision {revision!r}" if revision else repo_id
    log_in = "set HF_TOKEN, or log in with `hf auth login`"
    match result.problem:
        case "no repository":
            return (
                f"{endpoint} has no repository {repo_id}, or does not show it without the right token: check the name; "
                f"if it is private, {log_in}"
            )
        case "gated":
            return f"{repo_id} is gated: ask for access at {endpoint}/{repo_id}, then {log_in}"
        case "refused":
            return f"{endpoint} refuses access to {repo_id} ({result.detail}): check the token; {log_in}"
        case "no revision":
            return f"{repo_id} has no revision {revision!r}: leave --revision out for its main branch, or name a tag"
        case "no safetensors":
            return (
                f"{at_revision} holds no {result.detail.rpartition(': ')[2]}: choose a repository with a Hugging Face "
                "checkpoint in safetensors"
            )
        case "no tokenizer":
            return f"{at_revision} holds no tokenizer.json: choose a repository that does"
        case "offline" if not may_fetch:
            return f"{at_revision} is not complete in the cache {cache}; {again} fetches it"
        case "offline":
            return (
                f"{at_revision} is not complete in the cache {cache} and HF_HUB_OFFLINE forbids to fetch it: "
                f"unset HF_HUB_OFFLINE and run {again} once"
            )
        case "unreachable":
            return (
                f"{at_revision} is not complete in the cache {cache} and {endpoint} cannot be reached "
                f"({result.detail}): connect to the network once and run {again}"
            )
        case "disk full":
            return f"no space is left in the cache {cache}: free some there, or set HF_HOME to another folder"
        case "not writable":
            return f"cannot write to the cache {cache}: make it writable, or set HF_HOME to another folder"
        case "bad name":
            return f"{repo_id} is no name of a repository: it is ORG/NAME"
        case _:
            return f"fetching {at_revision} from {endpoint} failed: {result.detail}"
