"""The fields of config.json of a model whose layers keep a state, as the metadata of a GGUF file give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gguf.constants import Keys

from eventlm.models.families.fields import FULL
from eventlm.models.families.lfm2 import CONVOLUTION
from eventlm.models.families.qwen_next import DELTA
from eventlm.models.gguf.model_keys import ModelKeys

#: Architectures of llama.cpp without experts whose layers keep a state, and what transformers calls them.
HYBRID_ARCHITECTURES = {
    "lfm2": "Lfm2ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
}
#: In files of these, value heads of different key heads are in turns.
_INTERLEAVED = ("qwen35", "qwen35moe")
#: Whether each layer keeps a state; gguf-py has no name for the key.
_RECURRENT_LAYERS = "{arch}.attention.recurrent_layers"
#: Every so many layers one has attention, where no key says it.
_INTERVAL = 4


def hybrid_fields(keys: ModelKeys, tensors: Iterable[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of the architecture of `keys`, beside the other `fields`; none if no layer keeps a state.

    tensors: the names of those of the model.

    Raises CheckpointError, naming the file and the key, for what cannot be run.
    """
    make = _MAKERS.get(keys.architecture)
    return {} if make is None else make(_Hybrid(keys, tensors, fields))


class _Hybrid:
    def __init__(self, keys: ModelKeys, tensors: Iterable[str], fields: Mapping[str, Any]) -> None:
        self._keys, self._tensors, self._fields = keys, tensors, fields

    def qwen(self) -> dict[str, Any]:
        num_keys, num_values = self._keys.size(Keys.SSM.GROUP_COUNT), self._keys.size(Keys.SSM.TIME_STEP_RANK)
        num_drafting = self._keys.count(Keys.LLM.NEXTN_PREDICT_LAYERS, self._fields["num_hidden_layers"] - 1)
        values_size = self._keys.size(Keys.SSM.INNER_SIZE)
        if values_size % num_values:
            self._keys.refuse(Keys.SSM.INNER_SIZE, f"is {values_size:,}, no multiple of {num_values:,} heads")
        self._check_sections()
        # The number of blocks counts those that draft tokens.
        num_layers = self._fields["num_hidden_layers"] - num_drafting
        return {
            "num_hidden_layers": num_layers,
            "mtp_num_hidden_layers": num_drafting,
            "layer_types": self._kinds(num_layers),
            "linear_conv_kernel_dim": self._keys.size(Keys.SSM.CONV_KERNEL),
            "linear_key_head_dim": self._keys.size(Keys.SSM.STATE_SIZE),
            "linear_value_head_dim": values_size // num_values,
            "linear_num_key_heads": num_keys,
            "linear_num_value_heads": num_values,
            "linear_value_heads_interleaved": self._keys.architecture in _INTERLEAVED and num_keys != num_values,
        }

    def lfm2(self) -> dict[str, Any]:
        heads = self._keys.raw(Keys.Attention.HEAD_COUNT_KV)
        num_layers = self._fields["num_hidden_layers"]
        if type(heads) is not list or len(heads) < num_layers or {*map(type, heads)} != {int}:
            self._keys.refuse(Keys.Attention.HEAD_COUNT_KV, "has no number for each layer, 0 where it has no attention")
        return {
            "layer_types": [FULL if count else CONVOLUTION for count in heads[:num_layers]],
            "conv_L_cache": self._keys.size(Keys.ShortConv.L_CACHE),
            "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in self._tensors),
            "norm_eps": self._fields.get("rms_norm_eps"),
            "block_auto_adjust_ff_dim": False,
        }

    def _kinds(self, num_layers: int) -> list[str]:
        """Of each layer."""
        found = self._keys.raw(_RECURRENT_LAYERS)
        if found is None:
            interval = self._keys.get(Keys.LLM.FULL_ATTENTION_INTERVAL, int, _INTERVAL)
            if interval < 1:
                self._keys.refuse(Keys.LLM.FULL_ATTENTION_INTERVAL, f"is {interval}, it must be positive")
            found = [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if type(found) is not list or len(found) < num_layers or {*map(type, found)} - {bool, int}:
            self._keys.refuse(_RECURRENT_LAYERS, "has no entry for each layer")
        return [DELTA if one else FULL for one in found[:num_layers]]

    def _check_sections(self) -> None:
        """Positions of text are the same on all three axes, so that it does not matter which pairs an axis has."""
        sections = self._keys.raw(Keys.Rope.DIMENSION_SECTIONS)
        if sections is not None and (type(sections) is not list or any(sections[3:])):
            self._keys.refuse(Keys.Rope.DIMENSION_SECTIONS, f"is {sections!r:.80}, and positions have three axes")


_MAKERS: dict[str, Callable[[_Hybrid], dict[str, Any]]] = {
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _Hybrid.qwen),
    **dict.fromkeys(("lfm2", "lfm2moe"), _Hybrid.lfm2),
}
