"""The forward pass of a model that transformers computes, on a processor.

The tokens of a step are one sequence to it, row after row. It calls our attention in the place of its own, which stores
keys and values in the KV cache and attends there, each row to its own.

Shapes: T tokens of the step, S of them whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.decoder import DecoderRow, KVLayers
from eventlm.kernels.cpu.native import library_hash, unsupported_blocks, unsupported_heads
from eventlm.kernels.cpu.paged_attention import CompiledAttention, LayerAttention
from eventlm.kernels.cpu.products import Products
from eventlm.models.config import resolve_dtype
from eventlm.models.cpu_kernels import choose_operations
from eventlm.models.loader import torch_dtype
from eventlm.models.transformers_model import TransformersModel, in_one_line
from eventlm.system.processors import usable_cores
from eventlm.types import OnProgress
from eventlm.worker.batch import Batch, build_batch
from eventlm.worker.cache_engine import CacheEngine, StepAttention
from eventlm.worker.compiled_norm import compile_norms
from eventlm.worker.compiled_rotary import CompiledRotary
from eventlm.worker.isolation import keeps_apart, num_blocks_written
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.packed_linear import pack_linears
from eventlm.worker.protocol import WorkerSetup, transformers_backend
from eventlm.worker.ranks.kv_group import GroupStep
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
        self.residual_dtype = torch_dtype(dtype)
        self._model = load_model(Path(setup.model), self.residual_dtype)
        self._body = self._model.get_submodule(model.body)
        self._output_type: Any = None
        self._compiled: CompiledAttention | None = None
        self._rotary: AbstractContextManager[None] = nullcontext()
        if build := choose_operations(setup.cpu_kernels, dtype):
            self._pack(setup, build)
        self._check_isolation(setup)
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
        compile_norms(self._model, products)
        self._rotary = CompiledRotary(self._model, products)
        self._compiled = self._compile_attention(build, products)
        if self._compiled is not None and not self._has_matrices():
            # What torch computes between two products is small, and its own threads would keep these ones waiting.
            torch.set_num_threads(1)
        self.host |= {
            "attention_backend": transformers_backend(build, attends=self._compiled is not None),
            "kernel_library": library_hash(build),
            "threads": num_threads,
        }

    def _has_matrices(self) -> bool:
        """Whether there are some that torch multiplies by: of experts, or of layers that are no `nn.Linear`."""
        embeddings = {part.weight for part in self._model.modules() if isinstance(part, torch.nn.Embedding)}
        return any(weight.dim() > 1 and weight not in embeddings for weight in self._model.parameters())

    def _compile_attention(self, build: str, products: Products) -> CompiledAttention | None:
        """None if it cannot run the model."""
        layers = [
            LayerAttention(
                num_heads=call.num_heads,
                num_kv_heads=call.num_kv_heads,
                key_size=call.key_size,
                value_size=call.value_size,
                head_dim=call.kv_shape.head_dim,
                window=call.window,
            )
            for call in self._description.layers
        ]
        reasons = [unsupported_blocks(self._block_size)]
        reasons += [unsupported_heads(each.num_heads, each.num_kv_heads, each.head_dim) for each in layers]
        if reason := next(filter(None, reasons), ""):
            print(f"the compiled attention is not used, torch's is several times slower: {reason}", file=sys.stderr)
            return None
        return CompiledAttention(build, products, KVLayers(self.cache.layers), layers)

    @torch.inference_mode()
    def _check_isolation(self, setup: WorkerSetup) -> None:
        is_isolated = keeps_apart(
            lambda rows: self.run(rows, None),
            vocab_size=self.vocab_size,
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
        )
        self.cache.clear(num_blocks_written(setup.block_size, setup.num_blocks))
        if not is_isolated:
            raise CheckpointError(
                f"{setup.model}: transformers cannot serve this {self._description.architecture} here: what it gives "
                "for a token depends on the other sequences of the step, by something that is not its attention"
            )

    @torch.inference_mode()
    def _try(self) -> None:
        """A pass that attends to nothing, to the end."""
        self.logits(self._hidden(_NO_TOKENS, _NO_TOKENS, _NoAttention()))

    def run(
        self,
        rows: Seq[Row],
        timer: OpTimer | None,
        residual_TH: Tensor | None = None,
        step: GroupStep | None = None,
    ) -> Tensor:
        """The hidden states that the output matrix takes, [T, H]: after the last norm, if there is one."""
        batch = build_batch(rows, block_size=self._block_size, device=torch.device("cpu"))
        attention = self._begin(rows, batch)
        if timer:
            timer.lap("prepare")
        hidden_TH = self._hidden(batch.token_ids_T[None], batch.positions_T[None], attention)
        if timer:
            timer.lap("transformers")
        return hidden_TH

    def _begin(self, rows: Seq[Row], batch: Batch) -> _Attention:
        """The attention of a step."""
        if self._compiled is not None:
            self._compiled.begin([DecoderRow(row.start, row.num_tokens, row.sequence.block_table) for row in rows])
            return self._compiled
        self.cache.clear_slots(batch.tails_R)
        return _TorchAttention(self._description, self.cache.attention(batch.slots_T, batch.attention_rows, ()))

    def _hidden(self, token_ids_1T: Tensor, positions_1T: Tensor, step: _Attention) -> Tensor:
        token = _CALLS.set(_Calls(step))
        try:
            with self._rotary:
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


class _Attention(Protocol):
    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTE: Tensor,
        *,
        scale: float,
        soft_cap: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """[T, H, E], where E is the size of a value, which may differ from D."""
        ...


class _NoAttention:
    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTE: Tensor, **options: Any) -> Tensor:
        num_heads, num_tokens, _ = q_HTD.shape
        return q_HTD.new_zeros((num_tokens, num_heads, v_KTE.shape[-1]))


class _TorchAttention:
    """In torch's operations."""

    def __init__(self, model: TransformersModel, step: StepAttention) -> None:
        self._layers, self._step = model.layers, step

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTE: Tensor, **options: Any) -> Tensor:
        call = self._layers[layer]
        if call.key_size == call.value_size:
            return self._step.attend(layer, *_by_token(q_HTD, k_KTD, v_KTE), **options)
        # The cache has room for the larger one, and zeros add nothing to a score.
        size = call.kv_shape.head_dim
        padded = (pad(each, (0, size - each.shape[-1])) for each in (q_HTD, k_KTD, v_KTE))
        out_THD = self._step.attend(layer, *_by_token(*padded), **options)
        return out_THD[..., : call.value_size]


class _Calls:
    """The calls of the attention in a forward pass, of which it counts how many there were."""

    def __init__(self, step: _Attention) -> None:
        self._step = step
        self._numbers = count()

    def attend(self, q_HTD: Tensor, k_KTD: Tensor, v_KTE: Tensor, **options: Any) -> Tensor:
        return self._step.attend(next(self._numbers), q_HTD, k_KTD, v_KTE, **options)


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
            # They are told below, by name.
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        # It raises almost anything.
        raise CheckpointError(f"{folder}: transformers cannot load it: {in_one_line(error)}") from error
    if missing := sorted(found["missing_keys"]):
        more = f" ({len(missing)} are)" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing{more}; download the model again")
    if others := sorted(found["mismatched_keys"]):
        name, shape, expected = others[0]
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {list(shape)}, by config.json it is {list(expected)}; the two are not "
            "of one model"
        )
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
