"""Whether a trace can be run again, and on which model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import closed_name
from eventlm.bus.segment_reader import corrupt
from eventlm.bus.token_log_reader import open_token_log
from eventlm.config import CacheConfig, GpuConfig, ModelConfig, WorkerConfig
from eventlm.config.structs import AUTO, MAX_THREADS
from eventlm.errors import UsageError
from eventlm.events import Header

#: Of a header's configuration, by section: what has a say in how the run was computed. Other options may have come or
#: gone since.
_OPTIONS = {
    "model": ("dtype", "quantization", "fake"),
    "cache": ("kv_cache_dtype",),
    "gpu": ("batch_invariant", "torch_compile"),
    "worker": ("start_timeout_seconds", "step_timeout_seconds"),
}


class RecordedHost(Struct, frozen=True, kw_only=True):
    """What the workers of a run said of themselves, as far as it has a say in how it is run again."""

    device: str = ""
    gpu: str = "of no known name"
    tokenizer: str = ""
    dtype: str = ""
    threads: Annotated[int, Meta(ge=0, le=MAX_THREADS)] = 0
    attention_backend: str = AUTO


class Computed(Struct, frozen=True, kw_only=True):
    """How a run was computed. Of the sections only the fields that have a say in it are as they were recorded."""

    model: ModelConfig
    cache: CacheConfig
    gpu: GpuConfig
    worker: WorkerConfig
    host: RecordedHost


def computed(header: Header) -> Computed:
    """What a header says of it. Raises msgspec.ValidationError for what no engine can have recorded."""
    sections = {
        section: {name: value for name, value in header.config.get(section, {}).items() if name in names}
        for section, names in _OPTIONS.items()
    }
    return msgspec.convert({**sections, "host": header.host}, Computed)


def check_executable(path: Path | str) -> Header:
    """The header of a trace that can be run again. Raises UsageError for one that cannot, and what LogReader raises."""
    with LogReader(path) as reader:
        header = reader.header
        try:
            computed(header)
        except msgspec.ValidationError as error:
            what = f"its header does not say how the run was computed: {error}; take another copy of the trace"
            raise corrupt(reader.path, 1, 0, what) from error
        if header.s:
            folder, first_name = Path(reader.path).parent, closed_name(0)
            remedy = f"give the run's folder {folder}" if (folder / first_name).exists() else "a larger --record-keep"
            raise UsageError(
                f"{path} begins at event {header.s}, in the middle of the run: the KV cache of its requests is not "
                f"there, so it cannot be run again; that needs the run's first file ({remedy})"
            )
        first = next(iter(reader))
        open_token_log(first.path, header).close()
        return header


def recorded_model(header: Header, given: str | None = None) -> ModelConfig:
    """The model that ran, as it was asked for; with `given` another place of it. Raises UsageError if none is named."""
    recorded = header.config.get("model", {})
    if given is not None and given != recorded.get("model"):
        return ModelConfig(model=given)
    if not recorded.get("model"):
        raise UsageError("the trace's header does not say which model ran; give its folder with --model")
    names = ("model", "revision", "fake")
    try:
        return msgspec.convert({name: recorded[name] for name in names if name in recorded}, ModelConfig)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the trace's header names no model that can be read ({error}); give its folder with --model"
        ) from error
