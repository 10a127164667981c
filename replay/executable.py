"""Whether a trace can be run again, and on which model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import closed_name
from eventlm.bus.side_car_reader import open_side_car
from eventlm.config import ModelConfig
from eventlm.errors import UsageError
from eventlm.events import Header


def check_executable(path: Path | str) -> Header:
    """The header of a trace that can be run again. Raises UsageError for one that cannot, and what LogReader raises."""
    with LogReader(path) as reader:
        header = reader.header
        if header.s:
            folder, first_name = Path(reader.path).parent, closed_name(0)
            remedy = f"give the run's folder {folder}" if (folder / first_name).exists() else "a larger --record-keep"
            raise UsageError(
                f"{path} begins at event {header.s}, in the middle of the run: the KV cache of its requests is not "
                f"there, so it cannot be run again; that needs the run's first file ({remedy})"
            )
        first = next(iter(reader))
        open_side_car(first.path, header).close()
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
