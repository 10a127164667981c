"""Options of the model's forward pass on GPUs: section [gpu]."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from eventlm.types import parts_per_million


class GpuConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device, and what is for GPUs."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(
            description="what computes the model; cuda: NVIDIA GPUs, each replica on the next one in "
            "CUDA_VISIBLE_DEVICES; auto: cuda if there are a GPU, its driver, a torch with CUDA and "
            "triton, else cpu"
        ),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME"},
            description="attention on a GPU: triton, flash_attn (which must be installed), torch_sdpa (slow, to "
            "compare with), or one that a package offers; auto: the first of these that can run the model",
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        str,
        Meta(
            pattern=r"^(0?\.[0-9]{0,5}[1-9]0*|1(\.0*)?)$",
            extra={"metavar": "SHARE", "allowed": "a share above 0 and up to 1, such as 0.9", "number": True},
            description="share of a GPU's memory for weights, activations and KV cache of all replicas on it; the KV "
            "cache gets what a profiling run leaves, unless num_blocks or kv_memory is given",
        ),
    ] = "0.9"
    cuda_graphs: Annotated[
        bool,
        Meta(
            description="capture steps that only decode as CUDA graphs, for several batch sizes, when a worker "
            "starts; a smaller step is padded to the next size"
        ),
    ] = True
    batch_invariant: Annotated[
        bool,
        Meta(
            description="use GPU kernels whose results for a sequence do not depend on the rest of its batch: the "
            "same tokens under any load, somewhat slower"
        ),
    ] = False
    torch_compile: Annotated[
        bool,
        Meta(
            description="compile the parts of the model around attention with torch.compile on a GPU, which makes "
            "the first start minutes slower"
        ),
    ] = False

    @property
    def memory_ppm(self) -> int:
        """`gpu_memory_utilization` in parts per million."""
        return parts_per_million(self.gpu_memory_utilization)
