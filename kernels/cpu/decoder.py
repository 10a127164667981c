"""A decoder whose forward pass is compiled (decoder.h), with its packed weights.

Shapes: T tokens of a step, R rows, S rows whose logits are wanted, V vocabulary, H hidden size.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.meeting import PeerGroup, slot_bytes_for
from eventlm.kernels.cpu.native import (
    EMBED,
    EXACT_MATRICES,
    HEADS,
    PACKED_TYPES,
    WEIGHTS,
    Instruction,
    MeetingEndedError,
    NativeModel,
    library,
)
from eventlm.kernels.sequence_states import NO_STATES, StateRow, StepStates

#: In the order of decoder.h's Part.
PARTS = (
    *("embed", "norm", "qkv_proj", "attention", "recurrent", "layer_inputs"),
    *("o_proj", "gate_up_proj", "down_proj", "router", "experts", "lm_head", "sample", "meeting", "add_parts"),
)
_FLOAT_BYTES = 4
#: The part that multiplies by a matrix.
_PART_OF = {
    "lm_head": "lm_head",
    **dict.fromkeys(("query", "key", "value", "output_gate", "mixed", "delta_gate"), "qkv_proj"),
    "output": "o_proj",
    **dict.fromkeys(("gate", "up"), "gate_up_proj"),
    "down": "down_proj",
    "router": "router",
    **dict.fromkeys(("inputs_projection", "input_gate", "input_up"), "layer_inputs"),
}
#: In the order of kv_cache.h's KVFormat: how each is kept, fp8 as its bytes.
_KV_DTYPES = (torch.bfloat16, torch.int8, torch.uint8)


class DecoderRow(NamedTuple):
    """`num_tokens` tokens after `start` others of a sequence with the blocks `block_table`, of type "i".

    The table is read from where it lies. Of a decoder with sharers, it has the blocks of its own shards alone, whose
    first one has the number `first_shard` in the context. first_shared: of a row that several sharers compute, the
    number of its first token among those of all such rows, in an order that all of them have; -1 of others.
    """

    start: int
    num_tokens: int
    block_table: array[int]
    first_shard: int = 0
    first_shared: int = -1


class KVLayers:
    """Keys and values, by layer: [2, blocks, key-value heads, block size, W] of each, keys first.

    W is head_dim of bfloat16, or head_dim + 4 bytes, int8 for integers and uint8 for fp8; only a decoder knows how it
    lays out what it stores there. None: of a layer without any.
    """

    def __init__(self, layers: Sequence[Tensor | None]) -> None:
        self._layers = [layer for layer in layers if layer is not None]
        self.num_blocks = self.block_size = self.format = 0
        if self._layers:
            _, self.num_blocks, _, self.block_size, _ = self._layers[0].shape
            self.format = _KV_DTYPES.index(self._layers[0].dtype)
        #: Where each begins.
        self.addresses = array("Q", [0 if layer is None else layer.data_ptr() for layer in layers])


class DrawRows(NamedTuple):
    """How S rows draw: greedily where the temperature is 0, else with noise.

    keys: of each row's sequence, 64 bits, see `eventlm.worker.sampling.noise`. positions: of the token in its output.
    """

    temperatures: Sequence[float]
    keys: Sequence[int]
    positions: Sequence[int]


class DecoderPeers(NamedTuple):
    """Whom a decoder meets that computes a part of a model, each of them with a part of its own.

    A member has some of the heads, key heads or channels of each layer, some columns of the neurons of each part, of
    experts as well, and some rows of the vocabulary. Its model is that smaller one, and its weights those rows and
    columns; routers, norms and layers' inputs are whole on each. So are the biases of `output` and `down`, which are
    added once. All members have the residual stream, and take each sum in one order: in float32, from the first
    member's part to the last one's, before bias and multiplier. They must use one build, or the last bits differ.

    vocab_starts: each member's first row of the vocabulary, then how many rows there are; empty if all
    members have all rows.
    """

    group: PeerGroup
    vocab_starts: Sequence[int] = ()


class DecoderSharers(NamedTuple):
    """Whom a decoder meets that has a part of each context, and all weights of its model.

    Contexts are cut into shards of `shard_tokens`, which are dealt out to the members in turns. A member computes the
    rows of whose contexts it has a part, and those whose tokens it is to store. Attention over the parts is put
    together in the order of the members' first shards, so that all get the same.
    """

    group: PeerGroup
    shard_tokens: int


def shared_bytes_for(num_shared: int, num_heads: int, head_dim: int) -> int:
    """The slot where sharers meet over a layer of so many query heads, in a step of so many tokens of shared rows."""
    return num_shared * num_heads * (head_dim + 2) * _FLOAT_BYTES


class CpuDecoder:
    """Weights are given one by one, then it runs, all in one thread at a time.

    ropes: cosines and sines of each rotary embedding, as `compiled_angles` makes them, by the number that instructions
    have of them. They are kept, and read where they lie.

    is_int8: matrices are int8, inputs become so (quantize.h).

    types: for matrices of codes (packed.h), by name, layer and expert, one of PACKED_TYPES. Inputs are a multiple of
    its block's, and those of MULTIPLIED_TOGETHER all have one. The output matrix that is the embedding as well is
    called that. The expert is -1 for what is not one expert's, here and below.

    peers: who has the other parts of the model. They make the same calls of `forward`, `logits` and `draw_next` in the
    same order, with the same rows, and get the same results. A call raises MeetingEndedError if one of them does not.

    sharers: who has the other parts of contexts. They call `forward` together.

    ValueError for tables that are not as instructions have them, and for a vocabulary that peers have not split as they
    say, or of which a part does not fit into their slots. MemoryError if the packed weights find no room, or
    the threads, or what a call works on.
    """

    def __init__(
        self,
        build: str,
        model: NativeModel,
        ropes: Sequence[tuple[Tensor, Tensor]],
        *,
        is_int8: bool = False,
        types: Mapping[tuple[str, int, int], str] | None = None,
        peers: DecoderPeers | None = None,
        sharers: DecoderSharers | None = None,
        num_threads: int,
    ) -> None:
        _check_ropes(model.instructions, ropes)
        if peers is not None:
            _check_peers(peers, model)
        self._functions = library(build)
        self._shape = shape = model.shape
        self._norm_offset = model.norm_offset
        self._weight_bytes = 1 if is_int8 else 2
        self._types = types or {}
        self._ropes = ropes
        cosines, sines = (array("Q", [tables[kind].data_ptr() for tables in ropes]) for kind in (0, 1))
        self._group = peers.group if peers is not None else None
        starts = array("i", peers.vocab_starts) if peers is not None else array("i")
        self._vocab_size = starts[-1] if starts else shape.vocab_size
        self._sharers = sharers
        #: Of each shape of attention: query heads, and elements of one.
        self._heads = {(each.num_heads, each.head_dim) for each in model.instructions if each.kind == HEADS}
        typed = self._typed_weights()
        self._handle = self._functions.eventlm_decoder(
            ctypes.byref(shape),
            (Instruction * len(model.instructions))(*model.instructions),
            len(model.instructions),
            cosines.buffer_info()[0],
            sines.buffer_info()[0],
            is_int8,
            typed.buffer_info()[0],
            len(self._types),
            self._group.handle if self._group is not None else None,
            starts.buffer_info()[0] if starts else None,
            sharers.group.handle if sharers is not None else None,
            sharers.shard_tokens if sharers is not None else 0,
            num_threads,
        )
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, self._functions.eventlm_free, self._handle)
        #: Where embeddings that are only looked up are read from, as they are.
        self._embeddings: dict[str, Tensor] = {}
        #: Of the matrices that each part multiplies by.
        self.weight_bytes: dict[str, int] = {}
        looked_up = {"inputs_embedding": (shape.inputs_vocab_size, shape.num_layers * shape.inputs_size)}
        if not shape.is_tied and any(each.kind == EMBED for each in model.instructions):
            looked_up["embedding"] = (shape.vocab_size, shape.hidden_size)
        for name, size in looked_up.items():
            if size[0] and (name, 0, -1) not in self._types:
                memory = self._embeddings[name] = host_memory.empty(size, torch.bfloat16)
                self._functions.eventlm_set_embedding(self._handle, WEIGHTS.index(name), memory.data_ptr())

    def pin(self, processors: Sequence[int]) -> None:
        """Keep each thread but the caller's on one of these processors, as many as there are threads."""
        numbers = array("i", processors)
        self._functions.eventlm_pin(self._handle, numbers.buffer_info()[0])

    def load(self, name: str, layer: int, values: Tensor, first_row: int = 0, expert: int = -1) -> None:
        """One of WEIGHTS, with `_bias` behind its name if it is a bias, as the checkpoint has it.

        A whole vector, or rows of a matrix [out, in] from `first_row`, a multiple of 32, on. Where the matrix is of
        codes, of type Q4_1 or Q8_0, the numbers are rounded to them.
        """
        number = WEIGHTS.index(name.removesuffix("_bias"))
        if name in EXACT_MATRICES:
            exact = values.float().contiguous()
            self._count(name, exact.nbytes)
            self._functions.eventlm_load_exact(self._handle, number, layer, exact.data_ptr(), first_row, len(exact))
            return
        if name == "shared_scale":
            # A matrix of one row.
            values = values.flatten()
        if values.dim() == 1:
            vector = values.float().contiguous()
            if name.endswith("_norm"):
                vector = vector + self._norm_offset
            is_bias = name.endswith("_bias")
            self._functions.eventlm_load_vector(self._handle, number, is_bias, layer, expert, vector.data_ptr())
            return
        if name in self._embeddings:
            self._embeddings[name][first_row : first_row + len(values)] = values
            return
        rows = values.to(torch.bfloat16).contiguous()
        kind = self._types.get((name, layer, expert))
        packed = PACKED_TYPES[kind] if kind else None
        num_in = rows.shape[1]
        row_bytes = packed.row_bytes(num_in) if packed else num_in * self._weight_bytes
        self._count(name, len(rows) * row_bytes, expert)
        self._functions.eventlm_load_matrix(self._handle, number, layer, expert, rows.data_ptr(), first_row, len(rows))

    def load_packed(self, name: str, layer: int, blocks: Tensor, first_row: int = 0, expert: int = -1) -> None:
        """Rows of a matrix of codes from `first_row`, a multiple of 32, on, as a GGUF file has them.

        blocks: uint8 [rows, bytes], of the type that the constructor was given.
        """
        blocks = blocks.contiguous()
        self._count(name, blocks.numel(), expert)
        number, count = WEIGHTS.index(name), len(blocks)
        self._functions.eventlm_load_packed(self._handle, number, layer, expert, blocks.data_ptr(), first_row, count)

    def _count(self, name: str, num_bytes: int, expert: int = -1) -> None:
        is_output = name == "embedding" and self._shape.is_tied and self._shape.has_lm_head
        part = "lm_head" if is_output else _PART_OF.get(name)
        if expert >= 0:
            part = "experts"
        if part is not None:
            self.weight_bytes[part] = self.weight_bytes.get(part, 0) + num_bytes

    def _typed_weights(self) -> array[int]:
        """As weights.h wants them: four numbers of each."""
        numbers = array("i")
        for (name, layer, expert), kind in self._types.items():
            is_output = name == "embedding" and self._shape.is_tied
            weight = WEIGHTS.index("lm_head" if is_output else name)
            numbers.extend((weight, layer, expert, PACKED_TYPES[kind].number))
        return numbers

    def forward(
        self,
        token_ids_T: Sequence[int],
        rows: Sequence[DecoderRow],
        kv: KVLayers,
        states: StepStates = NO_STATES,
        residual_TH: Tensor | None = None,
        num_shared: int = 0,
    ) -> Tensor:
        """The residual stream after the last layer, float32 [T, H]; stores the rows' keys and values.

        num_shared: with sharers, tokens of all rows that several of them compute. One that computes none of the step's
        rows calls this too, if there are any.

        token_ids_T: the rows' tokens, one row after the other. states: of a model whose layers have any, as many rows.
        How a state lies in its slot only this decoder knows. residual_TH: what the stream begins with, float32, where
        the program embeds no tokens; their ids are not read then.

        Raises ValueError if a step has more tokens than the slots where its peers or its sharers meet.
        """
        if residual_TH is not None:
            residual_TH = residual_TH.float().contiguous()
        # Arrays, for a step of a small model comes by here a hundred times a second with all of this out of the
        # processor's caches, and numpy's ways are longer.
        starts, counts, tables, first_shards, first_shared = zip(*rows, strict=True) if rows else [()] * 5
        num_tokens = sum(counts)
        self._check_slots(num_tokens)
        numbers = array("i", token_ids_T), array("i", starts), array("i", counts)
        addresses = array("Q", [table.buffer_info()[0] for table in tables])
        shares = self._shares(first_shards, first_shared, num_shared)
        token_ids, starts_R, counts_R, tables_R = (values.buffer_info()[0] for values in (*numbers, addresses))
        hidden_TH = torch.empty(num_tokens, self._shape.hidden_size)
        state_rows = _state_rows(states.rows)
        self._call(
            self._functions.eventlm_forward,
            token_ids,
            len(rows),
            starts_R,
            counts_R,
            tables_R,
            *(values.buffer_info()[0] if values else None for values in shares),
            num_shared,
            kv.addresses.buffer_info()[0],
            kv.format,
            kv.num_blocks,
            kv.block_size,
            states.memory.data_ptr() if states.rows else None,
            states.memory.shape[1],
            *(values.buffer_info()[0] for values in state_rows),
            None if residual_TH is None else residual_TH.data_ptr(),
            hidden_TH.data_ptr(),
        )
        return hidden_TH

    def _shares(
        self, first_shards: Sequence[int], first_shared: Sequence[int], num_shared: int
    ) -> tuple[array[int], array[int]]:
        """What eventlm_forward takes of them, nothing without sharers."""
        if self._sharers is None:
            return array("i"), array("i")
        needed = max((shared_bytes_for(num_shared, *heads) for heads in self._heads), default=0)
        if needed > (most := self._sharers.group.slot_bytes):
            raise ValueError(f"{num_shared} tokens of shared rows take {needed} bytes, slots of a meeting have {most}")
        return array("i", first_shards), array("i", first_shared)

    def _check_slots(self, num_tokens: int) -> None:
        if self._group is None:
            return
        needed, most = slot_bytes_for(num_tokens, self._shape.hidden_size), self._group.slot_bytes
        if needed > most:
            raise ValueError(f"{num_tokens} tokens take {needed} bytes, slots of a meeting have {most}")

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The last norm of what `forward` gave for these tokens, float32 [S, H]."""
        hidden_SH = hidden_SH.contiguous()
        normed_SH = torch.empty_like(hidden_SH)
        self._functions.eventlm_norm(self._handle, hidden_SH.data_ptr(), len(hidden_SH), normed_SH.data_ptr())
        return normed_SH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits, float32 [S, V], of what `forward` gave for these tokens."""
        hidden_SH = hidden_SH.contiguous()
        logits_SV = host_memory.empty((len(hidden_SH), self._vocab_size), torch.float32)
        self._call(self._functions.eventlm_logits, hidden_SH.data_ptr(), len(hidden_SH), logits_SV.data_ptr())
        return logits_SV

    def draw(self, logits_SV: Tensor, rows: DrawRows) -> list[int]:
        """One token id for each row of these logits, float32 [S, V]; -1 for a row with NaN or plus infinity."""
        return self._draw(self._functions.eventlm_draw, logits_SV, rows)

    def draw_next(self, hidden_SH: Tensor, rows: DrawRows) -> list[int]:
        """As `draw`, from what `forward` gave for these tokens. Their logits are never written to memory."""
        self._check_slots(len(rows.keys))
        return self._draw(self._functions.eventlm_draw_next, hidden_SH, rows)

    def _draw(self, draw: Callable[..., None], values_S: Tensor, rows: DrawRows) -> list[int]:
        values_S = values_S.contiguous()
        ids = array("i", bytes(4 * len(rows.keys)))
        arrays = array("f", rows.temperatures), array("Q", rows.keys), array("q", rows.positions), ids
        self._call(draw, values_S.data_ptr(), len(ids), *(values.buffer_info()[0] for values in arrays))
        return ids.tolist()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """What ends a meeting of peers is raised from what their transport said."""
        try:
            function(self._handle, *arguments)
        except MeetingEndedError as error:
            groups = [self._group, self._sharers.group if self._sharers is not None else None]
            failures = [group.failure() for group in groups if group is not None]
            raise error from next((each for each in failures if each is not None), None)

    def times_ns(self) -> dict[str, int]:
        """Time since the start by part of the forward pass."""
        times = self._functions.eventlm_times(self._handle)
        return {name: times[number] for number, name in enumerate(PARTS)}


def _check_ropes(instructions: Sequence[Instruction], ropes: Sequence[tuple[Tensor, Tensor]]) -> None:
    for each in instructions:
        if each.kind != HEADS or each.rope < 0:
            continue
        width = 2 * each.num_turned if each.is_interleaved else each.num_turned
        for name, table in zip(("cosines", "sines"), ropes[each.rope], strict=True):
            if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[1:] != (width,):
                raise ValueError(
                    f"{name} of rotary embedding {each.rope}: must be contiguous, torch.float32 [positions, {width}], "
                    f"are {table.dtype} {list(table.shape)} with strides {list(table.stride())}"
                )


def _check_peers(peers: DecoderPeers, model: NativeModel) -> None:
    group, starts = peers.group, peers.vocab_starts
    if not starts:
        return
    own = starts[group.number + 1] - starts[group.number] if len(starts) == group.size + 1 else -1
    if own != model.shape.vocab_size:
        raise ValueError(
            f"member {group.number} of {group.size} with {model.shape.vocab_size} rows of a vocabulary that is split "
            f"at {list(starts)}"
        )
    widest = max(end - start for start, end in itertools.pairwise(starts))
    if widest * _FLOAT_BYTES > group.slot_bytes:
        raise ValueError(
            f"{widest} logits take {widest * _FLOAT_BYTES} bytes, slots of a meeting have {group.slot_bytes}"
        )


def _state_rows(rows: Sequence[StateRow]) -> tuple[array[int], ...]:
    """Slots, sources, and how many copies there are of each row; then all copies, as recurrent.h has them."""
    copies = array("i")
    for row in rows:
        for copy in row.copies:
            copies.extend(copy)
    return (
        array("i", [row.slot for row in rows]),
        array("i", [row.source for row in rows]),
        array("i", [len(row.copies) for row in rows]),
        copies,
    )
