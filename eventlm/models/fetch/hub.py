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
#: The beginning of a quantized type in the name of a file.
_TYPE = re.compile(r"(?<![A-Z0-9])(?:[IT]?Q[0-9]+|NVFP4)")


def is_repo_id(text: str) -> bool:
    """Whether `text` has the form ORG/NAME or ORG/NAME:QUANTIZATION."""
    return _REPO_ID.fullmatch(text) is not None


def pull_repo(repo_id: str, revision: str = "", *, with_weights: bool = True, may_fetch: bool = True) -> Path:
    """The snapshot folder of a repository; files that are not in the cache are fetched, with progress on stderr.

    Of ORG/NAME:QUANTIZATION it is the GGUF file with that text in its name, or the first of its parts, which are all
    that is fetched.

    `revision` is a branch, a tag or a commit; empty is the main branch. Only config, tokenizer, chat template and
    safetensors are fetched; `with_weights=False` leaves the last out and needs a tokenizer only. Without a network,
    with HF_HUB_OFFLINE=1, or without `may_fetch`, the cache must have all of them. Raises PullError.
    """
    matched = _REPO_ID.fullmatch(repo_id)
    name, quantization = matched.groups() if matched else (repo_id, None)
    if quantization:
        _check_type(quantization)
    options = ["--no-weights"] * (not with_weights) + ["--cached-only"] * (not may_fetch)
    options += ["--gguf", quantization] if quantization else []
    arguments = [*options, name, *([revision] if revision else [])]
    code, output, errors = run_child(_SCRIPT, *arguments, shows_errors=True)
    line = output.removesuffix("\n")
    if code == 0:
        return Path(line)
    exit_code = ExitCode.USAGE if code == ExitCode.USAGE else ExitCode.FAILED
    raise PullError(line or f"fetching {repo_id} failed: {last_line(errors, code)}", exit_code=exit_code)


def _check_type(quantization: str) -> None:
    """Raise PullError if the text contains the prefixes of unsupported types only (IQ2_XXS, Q9_Z).

    UD-Q8_K_XL contains Q8, which is supported. Any other text may be part of a file's name.
    """
    # It loads numpy, which only such files cost.
    from eventlm.models.gguf.header import TENSOR_TYPES

    found = set(_TYPE.findall(quantization.upper()))
    if found and found.isdisjoint(kind.partition("_")[0] for kind in TENSOR_TYPES):
        raise PullError(
            f"{quantization} is not a type of GGUF files that can be run (supported: {', '.join(TENSOR_TYPES)}, and "
            "mixtures of these such as Q4_K_M)",
            exit_code=ExitCode.USAGE,
        )
