"""What a checkpoint is called on every host: its path, or its place in a cache, which each host has where it likes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from eventlm.errors import CheckpointError
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.models.fetch.default_model import KNOWN_MODELS
from eventlm.models.gguf.source import read_source

#: `cache` is eventlm's own, `hub` that of the Hugging Face hub.
Root = Literal["", "cache", "hub"]


class CheckpointName(Struct, frozen=True):
    """A path below one of the caches, or an absolute one where `root` is empty. Of a GGUF file it is the file's."""

    root: Root
    path: str


def name_of(folder: str | Path) -> CheckpointName:
    """The name of a checkpoint's or a tokenizer's folder on this host. Raises CheckpointError."""
    path = Path(folder).absolute()
    source = read_source(path)
    if source is not None and not Path(source.parts[0].path).is_relative_to(path):
        # The folder is made of the file, on each host anew.
        path = Path(source.parts[0].path)
    for root, place in _roots().items():
        if path.is_relative_to(place):
            return CheckpointName(root, str(path.relative_to(place)))
    return CheckpointName("", str(path))


def find_here(name: CheckpointName) -> Path:
    """The folder of that name on this host. Raises CheckpointError where there is none."""
    path = _roots()[name.root] / name.path if name.root else Path(name.path)
    if path.is_file():
        # It loads numpy, which only such files cost.
        from eventlm.models.fetch.gguf_folder import gguf_folder

        return gguf_folder(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no {path}; {_advice(name)}")
    return path


def _advice(name: CheckpointName) -> str:
    """How a host gets what it lacks."""
    parts = Path(name.path).parts
    if name.root == "hub":
        repo = parts[0].removeprefix("models--").replace("--", "/")
        if name.path.endswith(".gguf"):
            repo += f":{Path(name.path).stem.partition('-00001-of-')[0]}"
        return f"run on that host: eventlm pull {repo} --revision {parts[2]}"
    known = {known.replace(":", "-"): known for known in KNOWN_MODELS}
    if name.root == "cache" and parts[-1] in known:
        return f"run on that host: eventlm pull {known[parts[-1]]}"
    return "copy it to that path on that host"


def _roots() -> dict[Root, Path]:
    # It takes a moment to import.
    from huggingface_hub.constants import HF_HUB_CACHE

    return {"cache": cache_folder(), "hub": Path(HF_HUB_CACHE).absolute()}
