"""The fields of config.json of a Gemma 4, whose layers differ, as the metadata of a GGUF file give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf.constants import MODEL_TENSOR, TENSOR_NAMES, Keys

from eventlm.errors import CheckpointError
from eventlm.models.families.fields import FULL, SLIDING
from eventlm.models.gguf.model_keys import ModelKeys
from eventlm.models.gguf.source import GgufTensor

GEMMA4 = "gemma4"
_INPUTS_EMBEDDING = f"{TENSOR_NAMES[MODEL_TENSOR.PER_LAYER_TOKEN_EMBD]}.weight"
#: What the frequency of a pair is divided by that does not turn, or more.
_STOPPED = 1e29


def gemma4_fields(keys: ModelKeys, tensors: Mapping[str, GgufTensor], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Beside the other `fields`; none of another architecture.

    Raises CheckpointError, naming the file and the key, for what cannot be run.
    """
    return _Gemma4(keys, tensors, fields).fields() if keys.architecture == GEMMA4 else {}


class _Gemma4:
    def __init__(self, keys: ModelKeys, tensors: Mapping[str, GgufTensor], fields: Mapping[str, Any]) -> None:
        self._keys, self._tensors, self._fields = keys, tensors, fields
        self._num_layers: int = fields["num_hidden_layers"]

    def fields(self) -> dict[str, Any]:
        kinds = self._fields.get("layer_types")
        if kinds is None:
            self._keys.refuse(Keys.Attention.SLIDING_WINDOW_PATTERN, "is missing, or no entry for each layer")
        num_shared = self._keys.count(Keys.Attention.SHARED_KV_LAYERS, self._num_layers - 1)
        num_own = self._num_layers - num_shared
        sliding_dim = self._keys.get(Keys.Attention.KEY_LENGTH_SWA, int, self._fields["head_dim"])
        for key, of_keys, size in (
            (Keys.Attention.VALUE_LENGTH_SWA, Keys.Attention.KEY_LENGTH_SWA, sliding_dim),
            (Keys.Rope.DIMENSION_COUNT_SWA, Keys.Attention.KEY_LENGTH_SWA, sliding_dim),
            (Keys.Rope.DIMENSION_COUNT, Keys.Attention.KEY_LENGTH, self._fields["head_dim"]),
        ):
            if (found := self._keys.get(key, int, size)) != size:
                self._keys.refuse(key, f"is {found}, and {self._keys.name(of_keys)} is {size}")
        num_kv_heads = self._each(Keys.Attention.HEAD_COUNT_KV)
        own = [
            {"head_dim": self._fields["head_dim"] if kind == FULL else sliding_dim, "num_key_value_heads": count}
            for kind, count in zip(kinds, num_kv_heads, strict=True)
        ]
        without_values = [kind for layer, kind in enumerate(kinds[:num_own]) if not self._has_values(layer)]
        if {*without_values} - {FULL} or (without_values and len(without_values) < kinds[:num_own].count(FULL)):
            raise CheckpointError(
                f"{self._keys.path}: only some layers of one kind have a tensor attn_v, and such models are not "
                "supported; take another file of the model"
            )
        table = self._tensors.get(_INPUTS_EMBEDDING)
        return {
            "head_dim": sliding_dim,
            "per_layer_config": {str(layer): changes for layer, changes in enumerate(own)},
            "num_kv_shared_layers": num_shared,
            "attention_k_eq_v": bool(without_values),
            "hidden_size_per_layer_input": self._keys.get(Keys.LLM.EMBD_LENGTH_PER_LAYER_INP, int, 0),
            "vocab_size_per_layer_input": self._fields["vocab_size"] if table is None else table.shape[0],
            "use_double_wide_mlp": self._is_double_wide(num_own),
            "partial_rotary_factor": None,
            "rope_scaling": None,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": self._share(),
                    "rope_theta": self._fields["rope_theta"],
                },
                SLIDING: {"rope_type": "default", "rope_theta": self._fields.get("rope_local_base_freq")},
            },
        }

    def _has_values(self, layer: int) -> bool:
        return f"{TENSOR_NAMES[MODEL_TENSOR.ATTN_V].format(bid=layer)}.weight" in self._tensors

    def _is_double_wide(self, num_own: int) -> bool:
        """Whether layers that attend to the keys of others have twice as many neurons."""
        sizes = self._each(Keys.LLM.FEED_FORWARD_LENGTH)
        size = sizes[0]
        if sizes not in ([size] * len(sizes), [size] * num_own + [2 * size] * (len(sizes) - num_own)):
            self._keys.refuse(Keys.LLM.FEED_FORWARD_LENGTH, "differs by layer in a way that is not supported")
        return sizes[-1] != size

    def _share(self) -> float:
        """Of the pairs of a head that turn in layers without a window: the first, by the factors in the file."""
        scaling = self._fields.get("rope_scaling")
        if scaling is None:
            return 1.0
        factors: list[float] = scaling.get("short_factor", [])
        # What the factors of rope_freqs alone are read as.
        same = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        if scaling != same:
            raise CheckpointError(
                f"{self._keys.path}: its rotary embeddings are scaled ({scaling['rope_type']}), and such models are "
                "not supported; take another file of the model"
            )
        divisor = self._keys.get(Keys.Rope.SCALING_FACTOR, float, 1.0)
        if divisor not in (0.0, 1.0):
            self._keys.refuse(Keys.Rope.SCALING_FACTOR, f"is {divisor}, and such models are not supported")
        num_turning = sum(factor == 1.0 for factor in factors)
        if not all(factor >= _STOPPED for factor in factors[num_turning:]) or not num_turning:
            raise CheckpointError(
                f"{self._keys.path}: tensor rope_freqs.weight is not of pairs that turn and pairs that do not, and "
                "such models are not supported; take another file of the model"
            )
        return num_turning / len(factors)

    def _each(self, key: str) -> list[int]:
        """A number of each layer, which may be one for all."""
        value = self._keys.raw(key)
        values: list[Any] = value if isinstance(value, list) else [value] * self._num_layers
        if len(values) != self._num_layers or not all(type(one) is int and one > 0 for one in values):
            self._keys.refuse(key, f"is not a positive integer for each of {self._num_layers} layers")
        return values
