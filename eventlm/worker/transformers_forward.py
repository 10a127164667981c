"""The forward pass of a model that transformers computes, on a processor.

The tokens of a step are one sequence to it, row after row. It calls our attention in the place of its own, which stores
keys and values in the KV cache and attends there, each row to its own.

Shapes: T tokens of the step, S of them whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.native import library_hash
from eventlm.models.config import resolve_dtype
from eventlm.models.cpu_kernels import choose_build
from eventlm.models.loader import torch_dtype
from eventlm.models.transformers_model import TransformersModel
from eventlm.system.processors import usable_cores
from eventlm.types import OnProgress
from eventlm.worker.batch import build_batch
from eventlm.worker.cache_engine import CacheEngine, StepAttention
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.packed_linear import pack_linears
from eventlm.worker.protocol import WorkerSetup, transformers_backend
from eventlm.worker.sampling.sampler import Draw, DrawNext
from eventlm.worker.sequence_table import Row

#: By this name transformers knows our attention. There is none of that name among its functions that make masks, so it
#: makes none.
_ATTENTION = "eventlm_paged"


class TransformersForward:
    """A `Forward`. Raises CheckpointError if the weights are not those of the model."""

    draw: Draw | None = None
    draw_next: DrawNext | None = None

    def __init__(
        self, setup: WorkerSetup, model: TransformersModel, cache: CacheEngine, on_progress: OnProgress | None
    ) -> None:
        self.cache = cache
        self.host: dict[str, Any] = {
            "attention_backend": transformers_backend(""),
            "transformers": transformers.__version__,
        }
        #: Which operations there are, only transformers knows.
        self.weight_bytes: dict[str, int] = {}
        self.vocab_size = model.vocab_size
        self._description = model
        self._block_size = setup.block_size
        dtype = resolve_dtype(model, setup.dtype, setup.quantization)
        self._model = load_model(Path(setup.model), torch_dtype(dtype))
        self._body = self._model.get_submodule(model.body)
        self._output_type: Any = None
        build = choose_build(setup.cpu_kernels) if dtype == "bfloat16" else ""
        if build:
            self._pack(setup, build)
        # The engine logs what a worker prints.
        print(f"transformers computes this {model.architecture}, in more time than eventlm takes", file=sys.stderr)
        if any(layer.key_size != layer.value_size for layer in model.layers):
            print(f"keys and values are kept expanded and padded, {cache.token_bytes} bytes a token", file=sys.stderr)
        if on_progress is not None:
            num_bytes = sum(weight.nbytes for weight in self._model.parameters())
            on_progress(num_bytes, num_bytes)

    def _pack(self, setup: WorkerSetup, build: str) -> None:
        num_threads = setup.threads or usable_cores()
        products = pack_linears(self._model, self._try, build, num_threads)
        if products is None:
            return
        if setup.processors:
            products.pin(setup.processors)
        # What torch computes between two products is small, and its own threads would keep these ones waiting.
        torch.set_num_threads(1)
        self.host |= {
            "attention_backend": transformers_backend(build),
            "kernel_library": library_hash(build),
            "threads": num_threads,
        }

    @torch.inference_mode()
    def _try(self) -> None:
        """A pass that attends to nothing, to the end."""
        self.logits(self._hidden(_NO_TOKENS, _NO_TOKENS, _NoAttention()))

    def run(self, rows: Seq[Row], timer: OpTimer | None) -> Tensor:
        """The hidden states that the output matrix takes, [T, H]: after the last norm, if there is one."""
        batch = build_batch(rows, block_size=self._block_size, device=torch.device("cpu"))
        self.cache.clear_slots(batch.tails_R)
        step = self.cache.attention(batch.slots_T, batch.attention_rows, ())
        if timer:
            timer.lap("prepare")
        hidden_TH = self._hidden(batch.token_ids_T[None], batch.positions_T[None], step)
        if timer:
            timer.lap("transformers")
        return hidden_TH

    def _hidden(self, token_ids_1T: Tensor, positions_1T: Tensor, step: _Attention) -> Tensor:
        token = _CALLS.set(_Calls(self._description, step))
        try:
            output = self._body(input_ids=token_ids_1T, position_ids=positions_1T, use_cache=False)
        finally:
            _CALLS.reset(token)
        self._output_type = type(output)
        hidden: Tensor = output[0]
        return hidden[0]

    def lap(self, timer: OpTimer, name: str) -> None:
        timer.lap(name)

    def norm(self, hidden_SH: Tensor) -> Tensor:
        return hidden_SH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """What the whole model makes of these hidden states, in the place of those that its decoder gives."""
        given = self._output_type(last_hidden_state=hidden_SH[None])
        self._body.forward = lambda *_, **__: given
        try:
            logits: Tensor = self._model(input_ids=_NO_TOKENS, use_cache=False).logits
        finally:
            del self._body.forward
        return logits[0]


class _NoAttention:
    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, **options: Any) -> Tensor:
        return torch.zeros_like(q_THD)


_Attention = StepAttention | _NoAttention


class _Calls:
    """The calls of the attention in a forward pass, of which it counts how many there were."""

    def __init__(self, model: TransformersModel, step: _Attention) -> None:
        self._step = step
        self._calls = enumerate(model.layers)

    def attend(self, q_HTD: Tensor, k_KTD: Tensor, v_KTE: Tensor, **options: Any) -> Tensor:
        """[T, H, E], where E is the size of a value, which may differ from D."""
        layer, call = next(self._calls)
        if call.key_size == call.value_size:
            return self._step.attend(layer, *_by_token(q_HTD, k_KTD, v_KTE), **options)
        # The cache has room for the larger one, and zeros add nothing to a score.
        size = call.kv_shape.head_dim
        padded = (pad(each, (0, size - each.shape[-1])) for each in (q_HTD, k_KTD, v_KTE))
        out_THD = self._step.attend(layer, *_by_token(*padded), **options)
        return out_THD[..., : call.value_size]


def _by_token(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_HTD.transpose(0, 1).contiguous(),
        k_KTD.transpose(0, 1).contiguous(),
        v_KTD.transpose(0, 1).contiguous(),
    )


_CALLS: ContextVar[_Calls] = ContextVar("calls")
_NO_TOKENS = torch.zeros((1, 1), dtype=torch.int64)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Transformers' model of the checkpoint in `folder`, with our attention.

    Raises CheckpointError if a tensor is missing or has another shape than in the model.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        maker: Any = transformers.AutoModelForCausalLM
        model, found = maker.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:
        # It raises almost anything.
        raise CheckpointError(f"{folder}: transformers cannot load it: {str(error).partition(chr(10))[0]}") from error
    for kind, what in (("missing_keys", "is missing"), ("mismatched_keys", "has another shape than config.json gives")):
        if names := sorted(str(each) for each in found[kind]):
            raise CheckpointError(f"{folder}: tensor {names[0]} {what} ({len(names)} are so); download it again")
    if unused := sorted(found["unexpected_keys"]):
        print(f"{folder}: the model has no use for tensor {unused[0]} ({len(unused)} in all)", file=sys.stderr)
    return model.eval()


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """In the place of transformers' attention, of which it has the arguments: [1, heads, T, head size]."""
    out_THE = _CALLS.get().attend(
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        soft_cap=softcap or 0.0,
        sinks_H=s_aux,
    )
    return out_THE[None], None


transformers.AttentionInterface.register(_ATTENTION, _attend)
