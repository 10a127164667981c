"""The config.json that the metadata of a GGUF file stands for. `families/` makes a `ModelSpec` of it.

What no key says is what llama.cpp assumes. https://github.com/ggml-org/llama.cpp, in `conversion/`, has how the keys
are made of a config.json.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gguf.constants import MODEL_TENSOR, TENSOR_NAMES, Keys, RopeScalingType

from eventlm.errors import CheckpointError
from eventlm.models.families.fields import FULL, SLIDING
from eventlm.models.gguf.expert_fields import EXPERT_ARCHITECTURES, expert_fields
from eventlm.models.gguf.gemma4_fields import GEMMA4, gemma4_fields
from eventlm.models.gguf.header import GgufHeader, read_floats
from eventlm.models.gguf.hybrid_fields import HYBRID_ARCHITECTURES, hybrid_fields
from eventlm.models.gguf.model_keys import ModelKeys
from eventlm.models.gguf.source import GgufTensor

#: What transformers calls each architecture of llama.cpp that can be run; `llama` with experts is Mixtral.
ARCHITECTURES = {
    "arcee": "ArceeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    GEMMA4: "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    **EXPERT_ARCHITECTURES,
    **HYBRID_ARCHITECTURES,
}
EMBEDDING, HEAD = (f"{TENSOR_NAMES[tensor]}.weight" for tensor in (MODEL_TENSOR.TOKEN_EMBD, MODEL_TENSOR.OUTPUT))
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    f"{TENSOR_NAMES[tensor]}.weight"
    for tensor in (MODEL_TENSOR.ROPE_FREQS, MODEL_TENSOR.ROPE_FACTORS_SHORT, MODEL_TENSOR.ROPE_FACTORS_LONG)
)
#: Tensors that become a part of the configuration and are no weights.
SETTINGS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)

#: Keys whose value, if it is not this one, changes the computation in a way that nothing here computes, unless the
#: architecture is one of these.
_REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    Keys.Attention.CAUSAL: (True, ()),
    Keys.Attention.MAX_ALIBI_BIAS: (0.0, ()),
    Keys.Rope.DIMENSION_SECTIONS: (None, ("qwen35", "qwen35moe")),
}
#: Keys, the fields of config.json that have their value, and the architectures that have the key.
_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Keys.Attention.CLAMP_KQV: (("clip_qkv",), ("olmo",)),
    Keys.Attention.SCALE: (("attention_multiplier",), ("granite", "granitemoe")),
    Keys.LLM.EMBEDDING_SCALE: (("embedding_multiplier",), ("granite", "granitemoe")),
    Keys.LLM.RESIDUAL_SCALE: (("residual_multiplier",), ("granite", "granitemoe")),
    Keys.LLM.LOGIT_SCALE: (("logit_scale", "logits_scaling"), ("cohere2", "command-r", "granite", "granitemoe")),
    Keys.LLM.ATTN_LOGIT_SOFTCAPPING: (("attn_logit_softcapping",), ("gemma2",)),
    Keys.LLM.FINAL_LOGIT_SOFTCAPPING: (("final_logit_softcapping",), ("gemma2", "gemma3", GEMMA4)),
    Keys.Rope.FREQ_BASE_SWA: (("rope_local_base_freq",), ("gemma3", GEMMA4)),
}
#: Keys whose value 0 means that there is none.
_ZERO_IS_NONE = (Keys.Attention.SCALE, Keys.LLM.EMBEDDING_SCALE, Keys.LLM.RESIDUAL_SCALE)
#: What llama.cpp takes for a base of the rotary embedding that is not there.
_THETA = 10_000.0
#: Llama 3's scaling as the factors of the file have it; the converter assumes this context where it was trained.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
#: Layers of the models, the largest of Gemma 2 and 3, whose scores are scaled by the size of the stream per head.
_SCALED_BY_STREAM = {"gemma2": 46, "gemma3": 62}
#: Keys that Gemma 4 has for each layer, see `gemma4_fields`.
_OF_LAYERS = (Keys.Attention.HEAD_COUNT_KV, Keys.LLM.FEED_FORWARD_LENGTH)
#: An old key of what a linear scaling divides frequencies by.
_OLD_FACTOR = "{arch}.rope.scale_linear"
_LARGEST_FLOAT32 = 3.4e38
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_json(headers: Sequence[GgufHeader]) -> dict[str, Any]:
    """The fields of config.json for a model of these parts; the first one has the metadata.

    Raises CheckpointError, naming the file and the key, for what cannot be run.
    """
    return _Reader(headers).config()


class _Reader:
    """Reads the keys of one architecture."""

    def __init__(self, headers: Sequence[GgufHeader]) -> None:
        self._keys = ModelKeys(headers[0])
        self._tensors: dict[str, tuple[GgufHeader, GgufTensor]] = {
            tensor.name: (header, tensor) for header in headers for tensor in header.tensors
        }

    def config(self) -> dict[str, Any]:
        self._check_runnable()
        vocab_size, hidden_size = self._embedding()
        num_layers = self._size(Keys.LLM.BLOCK_COUNT)
        if num_layers > len(self._tensors):
            self._keys.refuse(
                Keys.LLM.BLOCK_COUNT, f"is {num_layers:,}, and the file has {len(self._tensors):,} tensors"
            )
        num_heads = self._size(Keys.Attention.HEAD_COUNT)
        head_dim = self._size(Keys.Attention.KEY_LENGTH, hidden_size // num_heads)
        if not head_dim:
            self._keys.refuse(
                Keys.Attention.HEAD_COUNT, f"is {num_heads:,}, and the embedding has {hidden_size:,} columns"
            )
        if self._size(Keys.Attention.VALUE_LENGTH, head_dim) != head_dim:
            self._keys.refuse(Keys.Attention.VALUE_LENGTH, f"is not {head_dim}, which the keys' is")
        values = {
            "architectures": [ARCHITECTURES[self._keys.architecture]],
            "dtype": self._dtype(),
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": self._size(
                Keys.LLM.FEED_FORWARD_LENGTH,
                # Where all neurons are those of experts.
                self._keys.get(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, int),
            ),
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            # Layers without attention have none.
            "num_key_value_heads": self._size(
                Keys.Attention.HEAD_COUNT_KV, num_heads, skips_zeros=self._keys.architecture in ("lfm2", "lfm2moe")
            ),
            "head_dim": head_dim,
            "max_position_embeddings": self._size(Keys.LLM.CONTEXT_LENGTH),
            "tie_word_embeddings": HEAD not in self._tensors,
            "rope_theta": self._number(Keys.Rope.FREQ_BASE, _THETA),
            # Of Granite, where no key says another.
            "attention_multiplier": head_dim**-0.5,
        }
        if values["rope_theta"] <= 1:
            self._keys.refuse(Keys.Rope.FREQ_BASE, f"is {values['rope_theta']}, it must be more than 1")
        values |= self._biases() | self._norms() | self._windows(num_layers) | self._rope(head_dim)
        for key, (fields, architectures) in _NUMBERS.items():
            number = self._number(key)
            if number == 0.0 and key in _ZERO_IS_NONE:
                number = None
            if self._keys.architecture in architectures and number is not None:
                values |= dict.fromkeys(fields, number)
            elif number not in (None, 0.0, 1.0, values["rope_theta"]):
                self._keys.refuse(
                    key, f"is {number}, and {self._keys.architecture} models that have it are not supported"
                )
        tensors = {name: tensor for name, (_, tensor) in self._tensors.items()}
        values |= self._of_architecture(values) | expert_fields(self._keys, tensors, values)
        return values | hybrid_fields(self._keys, tensors, values) | gemma4_fields(self._keys, tensors, values)

    def _check_runnable(self) -> None:
        if self._keys.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self._keys.path}: architecture {self._keys.architecture:.80} is not supported "
                f"(supported: {', '.join(ARCHITECTURES)})"
            )
        for key, (neutral, architectures) in _REFUSED.items():
            value = self._keys.raw(key)
            if value is not None and value != neutral and self._keys.architecture not in architectures:
                self._keys.refuse(key, f"is {value!r:.80}, and such models are not supported")

    def _embedding(self) -> tuple[int, int]:
        """Rows and columns of the embedding."""
        hidden_size = self._size(Keys.LLM.EMBEDDING_LENGTH)
        if EMBEDDING not in self._tensors:
            raise CheckpointError(f"{self._keys.path}: tensor {EMBEDDING} is missing; download the model again")
        header, tensor = self._tensors[EMBEDDING]
        if len(tensor.shape) != 2 or tensor.shape[1] != hidden_size:
            raise CheckpointError(
                f"{header.path}: tensor {EMBEDDING} has shape {list(tensor.shape)}, by key "
                f"{self._keys.name(Keys.LLM.EMBEDDING_LENGTH)} its rows have {hidden_size}; download the file again"
            )
        return tensor.shape[0], hidden_size

    def _dtype(self) -> str:
        """Of most weights of matrices; what quantized ones are computed in is bfloat16."""
        num_weights: Counter[str] = Counter()
        for _, tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                num_weights[tensor.type] += math.prod(tensor.shape)
        [(most, _)] = num_weights.most_common(1)
        return _DTYPES.get(most, "bfloat16")

    def _biases(self) -> dict[str, bool]:
        """Under all the names that families have for them."""
        has = {name: f"blk.0.{name}.bias" in self._tensors for name in ("attn_q", "attn_output", "ffn_up")}
        return {
            **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"), has["attn_q"]),
            "attention_out_bias": has["attn_output"],
            "mlp_bias": has["ffn_up"],
        }

    def _norms(self) -> dict[str, float]:
        """Under all the names that families have for them."""
        epsilons = {
            "rms_norm_eps": self._number(Keys.Attention.LAYERNORM_RMS_EPS),
            **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), self._number(Keys.Attention.LAYERNORM_EPS)),
        }
        return {field: value for field, value in epsilons.items() if value is not None}

    def _windows(self, num_layers: int) -> dict[str, Any]:
        size = self._keys.get(Keys.Attention.SLIDING_WINDOW, int)
        if not size:
            # Old files of Gemma 2 do not say what they have.
            return {"sliding_window": None} if size == 0 or self._keys.architecture != "gemma2" else {}
        pattern = self._keys.raw(Keys.Attention.SLIDING_WINDOW_PATTERN)
        if pattern is None:
            return {"sliding_window": size}
        if type(pattern) is int and pattern > 0:
            return {"sliding_window": size, "sliding_window_pattern": pattern}
        if type(pattern) is not list or len(pattern) < num_layers or {*map(type, pattern)} - {bool, int}:
            self._keys.refuse(Keys.Attention.SLIDING_WINDOW_PATTERN, "is neither a number nor an entry for each layer")
        return {"sliding_window": size, "layer_types": [SLIDING if one else FULL for one in pattern[:num_layers]]}

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rotary_dim = self._size(Keys.Rope.DIMENSION_COUNT, head_dim)
        share = rotary_dim / head_dim
        values: dict[str, Any] = {
            # The families multiply and round down.
            "partial_rotary_factor": share if int(head_dim * share) == rotary_dim else math.nextafter(share, math.inf)
        }
        original = self._keys.get(Keys.Rope.SCALING_ORIG_CTX_LEN, int) or 0
        scaling = self._scaling(rotary_dim, original)
        if scaling is not None:
            values["rope_scaling"] = scaling
        if original and (scaling is None or scaling["rope_type"] == "longrope"):
            values["original_max_position_embeddings"] = original
        return values

    def _scaling(self, rotary_dim: int, original: int) -> dict[str, Any] | None:
        kind = self._keys.get(Keys.Rope.SCALING_TYPE, str, RopeScalingType.LINEAR.value)
        factor = self._number(Keys.Rope.SCALING_FACTOR, self._number(_OLD_FACTOR)) or 1.0
        if LONG_FACTORS in self._tensors and SHORT_FACTORS in self._tensors:
            scaling: dict[str, Any] = {
                "rope_type": "longrope",
                "short_factor": self._factors(SHORT_FACTORS, rotary_dim),
                "long_factor": self._factors(LONG_FACTORS, rotary_dim),
                "attention_factor": self._number(Keys.Rope.SCALING_ATTN_FACTOR),
            }
        elif ROPE_FACTORS in self._tensors:
            return self._scaling_of_factors(rotary_dim)
        elif kind == RopeScalingType.LINEAR.value and factor != 1.0:
            scaling = {"rope_type": "linear", "factor": factor}
        elif kind == RopeScalingType.YARN.value:
            scale_of_all = self._number(Keys.Rope.SCALING_YARN_LOG_MUL)
            scaling = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original or None,
                "attention_factor": self._number(Keys.Rope.SCALING_YARN_ATTN_FACTOR),
                "beta_fast": self._number(Keys.Rope.SCALING_YARN_BETA_FAST),
                "beta_slow": self._number(Keys.Rope.SCALING_YARN_BETA_SLOW),
                "mscale": None if scale_of_all is None else 1.0,
                "mscale_all_dim": scale_of_all,
            }
        elif kind in (RopeScalingType.NONE.value, RopeScalingType.LINEAR.value):
            return None
        else:
            self._keys.refuse(Keys.Rope.SCALING_TYPE, f"is {kind:.80}, without what that needs")
        return {field: value for field, value in scaling.items() if value is not None}

    def _scaling_of_factors(self, rotary_dim: int) -> dict[str, Any]:
        """Llama 3's scaling if the factors are what it gives, else scaling by the factors themselves."""
        factors = self._factors(ROPE_FACTORS, rotary_dim)
        theta = self._number(Keys.Rope.FREQ_BASE, _THETA)
        largest = max(factors)
        wanted = _llama3_factors(theta, rotary_dim, largest)
        # Gemma 4 has factors of another kind.
        if self._keys.architecture != GEMMA4 and all(
            math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, wanted, strict=True)
        ):
            return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}

    def _factors(self, name: str, rotary_dim: int) -> list[float]:
        header, tensor = self._tensors[name]
        if tensor.type != "F32" or tensor.shape != (rotary_dim // 2,):
            raise CheckpointError(
                f"{header.path}: tensor {name} has type {tensor.type} and shape {list(tensor.shape)}, for "
                f"{rotary_dim} rotated elements of a head it must be F32 and [{rotary_dim // 2}]; download it again"
            )
        factors = [_shortest(value) for value in read_floats(header, tensor)]
        if not all(0 < factor < math.inf for factor in factors):
            raise CheckpointError(f"{header.path}: tensor {name} has numbers that are not positive; download it again")
        return factors

    def _of_architecture(self, values: dict[str, Any]) -> dict[str, Any]:
        """What is said in another way in one architecture than in the others."""
        match self._keys.architecture:
            case "gemma2" | "gemma3":
                by_stream = values["num_hidden_layers"] == _SCALED_BY_STREAM[self._keys.architecture]
                per_head = values["hidden_size"] // values["num_attention_heads"]
                return {"query_pre_attn_scalar": per_head if by_stream else values["head_dim"]}
            case "olmo2" if values["sliding_window"]:
                return {"architectures": ["Olmo3ForCausalLM"]}
            case "mistral3" if (beta := self._number(Keys.Attention.TEMPERATURE_SCALE)) is not None:
                return {
                    "architectures": ["Ministral3ForCausalLM"],
                    "rope_scaling": {**values.get("rope_scaling", {}), "llama_4_scaling_beta": beta},
                }
            case "stablelm":
                return {"use_parallel_residual": self._keys.get(Keys.LLM.USE_PARALLEL_RESIDUAL, bool, False)}
        return {}

    def _size(self, key: str, default: int | None = None, *, skips_zeros: bool = False) -> Any:
        """A number that must be positive; arrays of one for each layer must have the same in all, or perhaps 0."""
        value = self._keys.raw(key)
        if type(value) is list and skips_zeros:
            value = [one for one in value if one != 0] or value
        if type(value) is list and value:
            may_differ = self._keys.architecture == GEMMA4 and key in _OF_LAYERS
            if not may_differ and any(one != other for one, other in itertools.pairwise(value)):
                self._keys.refuse(key, "differs by layer, and such models are not supported")
            value = value[0]
        if value is None:
            return self._keys.need(key, int) if default is None else default
        if type(value) is not int or value < 1:
            self._keys.refuse(key, f"is {value!r:.80}, it must be a positive integer")
        return value

    def _number(self, key: str, default: float | None = None) -> Any:
        value = self._keys.get(key, float)
        if value is None:
            return default
        if not math.isfinite(value):
            self._keys.refuse(key, f"is {value}")
        return _shortest(value)


def _llama3_factors(theta: float, rotary_dim: int, factor: float) -> list[float]:
    """What each frequency is divided by."""
    low, high, context = _LLAMA3.values()
    factors = []
    for pair in range(rotary_dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * pair / rotary_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _shortest(value: float) -> float:
    """The number of the fewest digits that is the same as a float32, which is what was meant: 1e-05, not 9.99...e-06.

    A number that is no float32 stays as it is.
    """
    if abs(value) > _LARGEST_FLOAT32 or struct.unpack("<f", data := struct.pack("<f", value))[0] != value:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(one for one in candidates if struct.pack("<f", one) == data)
