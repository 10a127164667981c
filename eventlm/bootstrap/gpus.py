"""The GPUs of this machine, from the driver's management library (NVML): CUDA is not loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlm.engine.setup import Device
from eventlm.system.free_memory import free_bytes, total_bytes

if TYPE_CHECKING:
    from types import ModuleType

#: Limits a process to some of the GPUs, in an order of its own.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: The name of what runs GPU kernels without a GPU.
INTERPRETER = "Triton's interpreter"
#: How the UUID of a part of a GPU begins.
_MIG = "MIG-"


class Gpu(NamedTuple):
    """A GPU that a worker can be given. `number` is CUDA's, `capability` the version of what it can compute."""

    number: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]

    @property
    def device(self) -> Device:
        """The name that a worker gets."""
        return Device(f"cuda:{self.number}", self.name)


#: Stands for those of a cluster's nodes. What they have is seen by the workers that get them.
ELSEWHERE = Gpu(0, "a GPU of the cluster", 1 << 62, 1 << 62, (99, 0))


class FoundGpus(NamedTuple):
    """`problem`: why there are none, as the end of a sentence that says so."""

    gpus: list[Gpu]
    driver: str = ""
    problem: str = ""


def interpreted_gpu() -> Gpu | None:
    """The processor in a GPU's place if TRITON_INTERPRET=1 is set, to check kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return Gpu(0, INTERPRETER, total_bytes(), free_bytes(), (9, 0))


def find_gpus() -> FoundGpus:
    """The GPUs that CUDA would give this process, in its order.

    CUDA counts them as NVML does if CUDA_DEVICE_ORDER is PCI_BUS_ID, as it is for workers.
    """
    try:
        import pynvml
    except ImportError:
        return FoundGpus([], problem="the package nvidia-ml-py, which finds GPUs, is not installed (pip install it)")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return FoundGpus(
            [], problem=f"there is no NVIDIA driver that answers ({error}); install it, or give a container its GPU"
        )
    try:
        return _visible(pynvml)
    except pynvml.NVMLError as error:
        return FoundGpus([], problem=f"the NVIDIA driver does not answer ({error}); see what `nvidia-smi` says")
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: ModuleType) -> FoundGpus:
    driver = nvml.nvmlSystemGetDriverVersion()
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return FoundGpus([], driver, f"the NVIDIA driver {driver} has no GPU")
    wish = os.environ.get(VISIBLE_DEVICES)
    if wish is not None:
        handles = _chosen(nvml, handles, wish)
    if not handles:
        return FoundGpus([], driver, f"{VISIBLE_DEVICES}={wish} leaves none of the GPUs here")
    return FoundGpus([_describe(nvml, number, handle) for number, handle in enumerate(handles)], driver)


def _chosen(nvml: ModuleType, handles: list[Any], wish: str) -> list[Any]:
    """By numbers, starts of UUIDs, or UUIDs of parts of GPUs (MIG).

    As in CUDA, the first word that names none, or one for the second time, ends the list.
    """
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    chosen: dict[str, Any] = {}
    for word in map(str.strip, wish.split(",")):
        if word.startswith(_MIG):
            found = _mig_part(nvml, word)
        elif word.isdecimal():
            found = list(zip(uuids, handles, strict=True))[int(word) :][:1]
        else:
            found = [
                (uuid, handle) for uuid, handle in zip(uuids, handles, strict=True) if word and uuid.startswith(word)
            ]
        if len(found) != 1 or found[0][0] in chosen:
            break
        chosen.update(found)
    return list(chosen.values())


def _mig_part(nvml: ModuleType, uuid: str) -> list[tuple[str, Any]]:
    try:
        return [(uuid, nvml.nvmlDeviceGetHandleByUUID(uuid))]
    except nvml.NVMLError:
        return []


def _describe(nvml: ModuleType, number: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    is_part = nvml.nvmlDeviceGetUUID(handle).startswith(_MIG)
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_part else handle
    capability = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(number, nvml.nvmlDeviceGetName(handle), memory.total, memory.free, tuple(capability))
