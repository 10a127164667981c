"""Checks whether a trace can be re-executed, and on which model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import closed_name
from eventlm.bus.segment_reader import corrupt
from eventlm.bus.token_log_reader import open_token_log
from eventlm.config import CacheConfig, GpuConfig, ModelConfig, WorkerConfig
from eventlm.config.options import REPLICASETS
from eventlm.config.structs import AUTO, MAX_THREADS
from eventlm.errors import UsageError
from eventlm.events import Header, ReplicasetRecord

#: Options of a header's configuration, by section, that a re-execution needs. Other options may be of another version.
_OPTIONS = {
    "model": ("dtype", "quantization", "fake"),
    "cache": ("kv_cache_dtype",),
    "gpu": ("batch_invariant", "torch_compile"),
    "worker": ("start_timeout_seconds", "step_timeout_seconds"),
}


class RecordedHost(Struct, frozen=True, kw_only=True):
    """Properties of the recorded workers that a re-execution needs."""

    device: str = ""
    gpu: str = "of no known name"
    tokenizer: str = ""
    dtype: str = ""
    threads: Annotated[int, Meta(ge=0, le=MAX_THREADS)] = 0
    attention_backend: str = AUTO


class Computed(Struct, frozen=True, kw_only=True):
    """How a run was computed. Of the sections, only the fields in `_OPTIONS` are as recorded."""

    model: ModelConfig
    cache: CacheConfig
    gpu: GpuConfig
    worker: WorkerConfig
    host: RecordedHost


def computed(header: Header, number: int = 0) -> Computed:
    """Reads it from a header, of the replicaset of this number. Raises msgspec.ValidationError for an invalid one."""
    record = header.sets[number]
    own = _own_keys(header, record)
    sections = {
        section: {name: value for name, value in (header.config.get(section, {}) | own).items() if name in names}
        for section, names in _OPTIONS.items()
    }
    return msgspec.convert({**sections, "host": record.host}, Computed)


def _own_keys(header: Header, record: ReplicasetRecord) -> dict[str, Any]:
    """The options that a further replicaset has otherwise than the first."""
    own = header.config.get(REPLICASETS, {}).get(record.name, {}) if header.replicasets else {}
    return own if isinstance(own, dict) else {}


def check_executable(path: Path | str) -> Header:
    """The header of a trace that can be re-executed. Raises UsageError if it cannot, and what LogReader raises."""
    with LogReader(path) as reader:
        header = reader.header
        for each in header.sets:
            if each.core.forwards:
                raise UsageError(
                    f"{reader.path}: requests for {each.core.models[0]} were forwarded to other servers, which have "
                    "the model, so the run cannot be executed here; `eventlm replay` without --execute verifies it"
                )
        try:
            for number in range(len(header.sets)):
                computed(header, number)
        except msgspec.ValidationError as error:
            what = f"its header does not contain how the run was computed: {error}; use another copy of the trace"
            raise corrupt(reader.path, 1, 0, what) from error
        if header.s:
            folder, first_name = Path(reader.path).parent, closed_name(0)
            remedy = f"give the run's folder {folder}" if (folder / first_name).exists() else "a larger --record-keep"
            raise UsageError(
                f"{path} begins at event {header.s}, in the middle of the run, without the KV cache of its requests, "
                f"so it cannot be re-executed; that needs the run's first file ({remedy})"
            )
        first = next(iter(reader))
        open_token_log(first.path, header).close()
        return header


def recorded_model(header: Header, given: str | None = None, number: int = 0) -> ModelConfig:
    """The model of a replicaset of the run as configured then, or at `given`. Raises UsageError if there is none."""
    recorded = header.config.get("model", {}) | _own_keys(header, header.sets[number])
    if given is not None and given != recorded.get("model"):
        return ModelConfig(model=given)
    if not recorded.get("model"):
        raise UsageError("the trace's header does not name the model; give its folder with --model")
    names = ("model", "revision", "fake")
    try:
        return msgspec.convert({name: recorded[name] for name in names if name in recorded}, ModelConfig)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the trace's header names no model that can be read ({error}); give its folder with --model"
        ) from error
