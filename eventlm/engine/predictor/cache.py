"""Keeps the measurements of a warm-up, so that the next start of the same model on the same machine can skip it.

One small JSON file for each key in `predictor/` of the cache folder. It never stops a start: a file that is broken,
foreign or unreadable is measured anew and replaced; a folder that cannot be written costs one line in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

import eventlm
from eventlm.core.predictor import Predictor
from eventlm.core.shards import Layout
from eventlm.errors import UsageError
from eventlm.models.config import model_fingerprint, resolve_dtype
from eventlm.models.cpu_kernels import choose_build
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.models.served import read_served
from eventlm.system.source_hash import source_hash
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.warm_up import Shape, fitting_shapes

#: Files kept; the least recently used go first.
MAX_FILES = 64
#: No valid file is longer.
MAX_FILE_BYTES = 16 * 1024
#: With a larger coefficient a predicted time might not fit into a trace.
MAX_COEFFICIENT = 2**53
#: Sources that determine step times and the fit of the coefficients, relative to the package's folder.
_CODE = ("worker", "models", "kernels", "core/predictor.py", "engine/predictor/fit.py")
#: Lines of /proc/cpuinfo that identify the kind of processor, on x86 and on ARM.
_X86_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")

log = structlog.get_logger("eventlm.predictor")


class CacheKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the time of a step depends on. `code`, `torch` and `cpu` stand for software and host."""

    model: str
    dtype: str
    quantization: str
    #: As in the options of these names.
    model_impl: str
    kv_cache_dtype: str
    #: `cpu`, or the GPU's name.
    device: str
    threads: int
    #: The compiled forward pass for models in bfloat16; empty: torch's.
    cpu_kernels: str
    #: As in the options of these names, and the sizes of CUDA graphs.
    attention_backend: str
    batch_invariant: bool
    torch_compile: bool
    graph_buckets: list[int]
    block_size: int
    profile_ops: bool
    #: The steps of a warm-up within the worker's limits.
    shapes: list[Shape]
    code: str
    torch: str
    cpu: str
    #: The ranks that compute a step together.
    layout: Layout = Layout()


class _CacheFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: CacheKey
    #: As `Predictor.coefficients` has them.
    coefficients: list[int]


class PredictorCache:
    """The file of one key. `folder` need not exist."""

    def __init__(self, key: CacheKey, folder: Path) -> None:
        self._key = key
        digest = hashlib.blake2b(msgspec.json.encode(key), digest_size=16).hexdigest()
        self.path = folder / f"{digest}.json"

    def read(self) -> list[int]:
        """The coefficients measured earlier; empty if there are no valid ones."""
        try:
            with self.path.open("rb") as file:
                found = _decode(file.read(MAX_FILE_BYTES + 1), self._key)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            log.warning("the cached step times cannot be used", file=str(self.path), error=str(error))
            return []
        with contextlib.suppress(OSError):
            os.utime(self.path)
        return found

    def write(self, coefficients: list[int]) -> None:
        """Keep them for the next start. The file is replaced as a whole."""
        content = msgspec.json.format(msgspec.json.encode(_CacheFile(key=self._key, coefficients=coefficients)))
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Mode 0600 from the start.
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".", suffix=".json")
            try:
                with open(descriptor, "wb") as file:
                    file.write(content + b"\n")
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink()
                raise
            self._remove_oldest()
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("the step times are not cached", folder=str(self.path.parent), error=reason)

    def _remove_oldest(self) -> None:
        """Remove the oldest files. Other engines may do the same; half-written files of killed ones go too."""
        ages = []
        for path in self.path.parent.glob("*.json"):
            with contextlib.suppress(OSError):
                ages.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(ages)[:-MAX_FILES]:
            path.unlink(missing_ok=True)


def predictor_cache(worker: WorkerSetup) -> PredictorCache:
    """The cache file of a worker that runs a checkpoint. Raises CheckpointError."""
    key = CacheKey(
        model=model_fingerprint(worker.model),
        dtype=resolve_dtype(read_served(worker.model, worker.model_impl), worker.dtype, worker.quantization),
        quantization=worker.quantization,
        model_impl=worker.model_impl,
        kv_cache_dtype=worker.kv_cache_dtype,
        device=worker.gpu or worker.device,
        threads=worker.threads,
        cpu_kernels=choose_build(worker.cpu_kernels),
        attention_backend=worker.attention_backend,
        batch_invariant=worker.batch_invariant,
        torch_compile=worker.torch_compile,
        graph_buckets=worker.graph_buckets,
        block_size=worker.block_size,
        profile_ops=worker.profile_ops,
        shapes=fitting_shapes(worker),
        layout=worker.layout,
        code=source_hash(Path(eventlm.__file__).parent, _CODE),
        torch=_torch_version(),
        cpu=cpu_identity(_cpuinfo()),
    )
    return PredictorCache(key, cache_folder() / "predictor")


def cpu_identity(cpuinfo: str) -> str:
    """A hash of the kind of the first processor in /proc/cpuinfo, else of what Python knows of the machine."""
    lines = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    known = [
        f"{name.strip()}={value.strip()}" for name, _, value in lines if name.strip() in (*_X86_FIELDS, *_ARM_FIELDS)
    ]
    text = "\n".join([platform.machine(), *(known or [platform.processor()])])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def _torch_version() -> str:
    """Without loading torch; empty if it has no metadata."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _decode(content: bytes, key: CacheKey) -> list[int]:
    """The coefficients in a file's content. Raises ValueError, which includes decoding errors."""
    if len(content) > MAX_FILE_BYTES:
        raise ValueError("it is too long")
    found = msgspec.json.decode(content, type=_CacheFile)
    if found.key != key:
        raise ValueError("it belongs to something else")
    try:
        Predictor.from_coefficients(found.coefficients)
    except UsageError as error:
        raise ValueError(str(error)) from error
    if not 0 < max(found.coefficients) <= MAX_COEFFICIENT:
        raise ValueError("its coefficients are out of range")
    return found.coefficients
