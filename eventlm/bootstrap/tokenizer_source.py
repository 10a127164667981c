"""From the name of a tokenizer (`--tokenizer`) to the folder that it lies in."""

from __future__ import annotations

from pathlib import Path

from eventlm.bootstrap.model_source import find_model
from eventlm.config import ModelConfig
from eventlm.errors import CheckpointError, PullError, UsageError
from eventlm.models.default import KNOWN_MODELS
from eventlm.models.hub import is_repo_id, pull_repo
from eventlm.worker.protocol import FAKE_MODEL


def find_tokenizer_folder(given: str) -> Path | None:
    """The folder with the tokenizer.json of `given`, a folder or a model's name; None for the fake model's tokenizer.

    Of a repository of the Hugging Face hub no weights are fetched. Raises UsageError or CheckpointError where there
    is no such tokenizer, and PullError.
    """
    if given == FAKE_MODEL:
        return None
    if given in KNOWN_MODELS:
        return find_model(ModelConfig(model=given)).folder
    folder = Path(given).expanduser()
    if is_repo_id(given) and not folder.exists():
        try:
            return pull_repo(given, with_weights=False)
        except PullError as error:
            message = f"--tokenizer {given}: there is no such folder, and {error}"
            raise PullError(message, exit_code=error.exit_code) from error
    names = ", ".join([*KNOWN_MODELS, FAKE_MODEL])
    wanted = f"give a folder with a tokenizer.json, a repository of the Hugging Face hub (ORG/NAME), or one of {names}"
    if not folder.is_dir():
        found = "this is a file" if folder.exists() else "no such folder"
        raise UsageError(f"--tokenizer {given}: {found}; {wanted}")
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"--tokenizer {given}: this folder has no tokenizer.json; {wanted}")
    return folder
