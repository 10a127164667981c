"""The fields of config.json that say which experts a model has, as the metadata of a GGUF file give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gguf.constants import MODEL_TENSOR, TENSOR_NAMES, ExpertGatingFuncType, Keys

from eventlm.errors import CheckpointError
from eventlm.models.gguf.model_keys import ModelKeys
from eventlm.models.gguf.source import GgufTensor

#: Architectures of llama.cpp with experts, and what transformers calls them.
EXPERT_ARCHITECTURES = {
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
#: Those whose shares are sigmoids.
_SIGMOID = ("glm4moe", "lfm2moe")
#: Keys that must have this value, unless the architecture is one of these.
_NEUTRAL: tuple[tuple[str, tuple[float, ...], tuple[str, ...]], ...] = (
    (Keys.LLM.EXPERT_WEIGHTS_SCALE, (0.0, 1.0), ("glm4moe", "lfm2moe")),
    (Keys.LLM.EXPERT_GROUP_COUNT, (0, 1), ("glm4moe",)),
    (Keys.LLM.NEXTN_PREDICT_LAYERS, (0,), ("glm4moe", "qwen35moe")),
)


def expert_fields(keys: ModelKeys, tensors: Mapping[str, GgufTensor], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of the architecture of `keys`, beside the other `fields`; none if it has no experts.

    Raises CheckpointError, naming the file and the key or tensor, for what cannot be run.
    """
    return _Experts(keys, tensors, fields).fields()


class _Experts:
    def __init__(self, keys: ModelKeys, tensors: Mapping[str, GgufTensor], fields: Mapping[str, Any]) -> None:
        self._keys, self._tensors, self._fields = keys, tensors, fields

    def fields(self) -> dict[str, Any]:
        count = self._keys.get(Keys.LLM.EXPERT_COUNT, int, 0)
        if not count:
            if self._keys.architecture in EXPERT_ARCHITECTURES:
                self._keys.refuse(Keys.LLM.EXPERT_COUNT, "is 0 or missing, and the architecture has experts")
            return {}
        make = _MAKERS.get(self._keys.architecture)
        if make is None:
            self._keys.refuse(
                Keys.LLM.EXPERT_COUNT, f"is {count!r:.80}, and {self._keys.architecture} models have no experts"
            )
        for key, values, architectures in _NEUTRAL:
            value = self._keys.raw(key)
            if value is not None and value not in values and self._keys.architecture not in architectures:
                self._keys.refuse(key, f"is {value!r:.80}, and such models are not supported")
        self._check_gating()
        num_active = self._keys.need(Keys.LLM.EXPERT_USED_COUNT, int)
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return {
            **dict.fromkeys(names, count),
            **dict.fromkeys(("num_experts_per_tok", "moe_k"), num_active),
            **make(self),
        }

    def mixtral(self) -> dict[str, Any]:
        return {"architectures": ["MixtralForCausalLM"], "intermediate_size": self._expert_size()}

    def granite(self) -> dict[str, Any]:
        size = self._keys.get(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, int, 0)
        names = {"architectures": ["GraniteMoeSharedForCausalLM"]} if size else {}
        return {"intermediate_size": self._expert_size(), "shared_intermediate_size": size, **names}

    def olmoe(self) -> dict[str, Any]:
        return {"intermediate_size": self._expert_size(), **self._normalized(default=False)}

    def qwen2(self) -> dict[str, Any]:
        shared = self._shape(MODEL_TENSOR.FFN_UP_SHEXP, 2)[0]
        return {"shared_expert_intermediate_size": shared, **self._sizes(), **self._normalized(default=False)}

    def qwen3_next(self) -> dict[str, Any]:
        return {**self.qwen2(), **self._normalized(default=True)}

    def lfm2(self) -> dict[str, Any]:
        return {
            "num_dense_layers": self._keys.get(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, int, 0),
            "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in self._tensors),
            "routed_scaling_factor": self._keys.get(Keys.LLM.EXPERT_WEIGHTS_SCALE, float, 0.0) or 1.0,
            **self._sizes(),
            **self._normalized(default=True),
        }

    def qwen3(self) -> dict[str, Any]:
        return {**self._sizes(), **self._normalized(default=True)}

    def glm4(self) -> dict[str, Any]:
        num_drafting = self._keys.count(Keys.LLM.NEXTN_PREDICT_LAYERS, self._fields["num_hidden_layers"] - 1)
        return {
            # The number of blocks counts those that draft tokens.
            "num_hidden_layers": self._fields["num_hidden_layers"] - num_drafting,
            "num_nextn_predict_layers": num_drafting,
            "first_k_dense_replace": self._keys.get(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, int, 0),
            "n_shared_experts": self._keys.get(Keys.LLM.EXPERT_SHARED_COUNT, int, 0),
            "routed_scaling_factor": self._keys.get(Keys.LLM.EXPERT_WEIGHTS_SCALE, float, 0.0) or 1.0,
            "n_group": self._keys.get(Keys.LLM.EXPERT_GROUP_COUNT, int, 0) or 1,
            "topk_group": self._keys.get(Keys.LLM.EXPERT_GROUP_USED_COUNT, int, 0) or 1,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in self._tensors,
            **self._sizes(),
            **self._normalized(default=False),
        }

    def ernie(self) -> dict[str, Any]:
        return {
            "moe_layer_start_index": self._keys.get(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, int, 0),
            "moe_layer_interval": self._keys.get(Keys.LLM.INTERLEAVE_MOE_LAYER_STEP, int, 0) or 1,
            "moe_num_shared_experts": self._keys.get(Keys.LLM.EXPERT_SHARED_COUNT, int, 0),
            **self._sizes(),
        }

    def gpt_oss(self) -> dict[str, Any]:
        # No key says that the ends of yarn's range are not rounded.
        scaling = self._fields.get("rope_scaling")
        unrounded = {"rope_scaling": {**scaling, "truncate": False}} if scaling else {}
        return {"intermediate_size": self._expert_size(), **unrounded}

    def gemma4(self) -> dict[str, Any]:
        return {
            "enable_moe_block": True,
            "top_k_experts": self._keys.need(Keys.LLM.EXPERT_USED_COUNT, int),
            "moe_intermediate_size": self._shape(MODEL_TENSOR.FFN_DOWN_EXP, 3)[2],
        }

    def _check_gating(self) -> None:
        key = Keys.LLM.EXPERT_GATING_FUNC
        value = self._keys.get(key, int, 0)
        is_sigmoid = self._keys.architecture in _SIGMOID
        wanted = (ExpertGatingFuncType.SIGMOID,) if is_sigmoid else (ExpertGatingFuncType.SOFTMAX, 3)
        if value and value not in wanted:
            self._keys.refuse(key, f"is {value}, and {self._keys.architecture} models that have it are not supported")

    def _sizes(self) -> dict[str, int]:
        return {"moe_intermediate_size": self._expert_size()}

    def _expert_size(self) -> int:
        """Old files do not say it in a key."""
        return self._shape(MODEL_TENSOR.FFN_UP_EXP, 3)[1]

    def _shape(self, tensor: MODEL_TENSOR, num_dimensions: int) -> tuple[int, ...]:
        """Of the first layer that has such a tensor."""
        names = [TENSOR_NAMES[tensor].format(bid=layer) for layer in range(self._fields["num_hidden_layers"])]
        found = [name for name in (f"{name}.weight" for name in names) if name in self._tensors]
        if not found:
            raise CheckpointError(
                f"{self._keys.path}: tensor {names[-1]}.weight is missing, and key "
                f"{self._keys.name(Keys.LLM.EXPERT_COUNT)} says that there are experts; download the model again"
            )
        shape = self._tensors[found[0]].shape
        if len(shape) != num_dimensions:
            raise CheckpointError(
                f"{self._keys.path}: tensor {found[0]} has {len(shape)} dimensions, it must have {num_dimensions}; "
                "take another file of the model"
            )
        return shape

    def _normalized(self, *, default: bool) -> dict[str, bool]:
        return {"norm_topk_prob": self._keys.get(Keys.LLM.EXPERT_WEIGHTS_NORM, bool, default)}


_MAKERS: dict[str, Callable[[_Experts], dict[str, Any]]] = {
    "llama": _Experts.mixtral,
    "granitemoe": _Experts.granite,
    "olmoe": _Experts.olmoe,
    "qwen2moe": _Experts.qwen2,
    "qwen3moe": _Experts.qwen3,
    **dict.fromkeys(("qwen3next", "qwen35moe"), _Experts.qwen3_next),
    "lfm2moe": _Experts.lfm2,
    "glm4moe": _Experts.glm4,
    "ernie4_5-moe": _Experts.ernie,
    "gpt-oss": _Experts.gpt_oss,
    "gemma4": _Experts.gemma4,
}
