"""What a decoder computes, as data: a list of layers, each with its attention and its feed-forward part.

`families/` makes a `ModelSpec` of a config.json, `program.py` the list of operations that every forward pass executes.
Loads no torch: the control plane sizes the KV cache by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from eventlm.models.quantized.scheme import Method

#: Bytes of an element in each dtype that a decoder computes in.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
#: `gelu_tanh` is the approximation of GELU by a hyperbolic tangent, `relu2` the square of ReLU. `swiglu_oai` is that of
#: gpt-oss: `(up + 1) * gate * sigmoid(1.702 * gate)`, `gate` at most 7 and `up` between -7 and 7.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"]


class RopeSpec(Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021). The fields after `is_interleaved` belong to the scaled types.

    rotary_dim: how many elements of a head are rotated, its first ones. is_interleaved: element 2i is rotated with
    2i + 1, else i with i + rotary_dim / 2.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    rotary_dim: int
    is_interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_position_embeddings: int = 0
    #: Of yarn and longrope: cosines and sines are multiplied by it.
    attention_factor: float = 1.0
    #: Of longrope, one for each pair: for contexts of up to `original_max_position_embeddings`, and for longer ones.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    #: Of proportional: how many pairs turn, the first ones.
    num_pairs: int = 0

    @property
    def num_turned(self) -> int:
        """Pairs that turn, the first ones."""
        return self.num_pairs if self.type == "proportional" else self.rotary_dim // 2


class NormSpec(Struct, frozen=True, kw_only=True):
    """A norm. `offset` is added to its weights: Gemma's checkpoints store them less one."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False


class KVShape(NamedTuple):
    """What a token has of keys in a layer, and of values: `num_heads` times `head_dim` elements."""

    num_heads: int
    head_dim: int


class AttentionSpec(Struct, frozen=True, kw_only=True):
    """The attention of a layer. Without `rope` it does not see positions.

    scale: what scores are multiplied by. window: how many tokens a query sees, itself among them; 0: all before it.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0: they stay as they are. qk_norm: a norm of queries
    and of keys, over each head or over all heads together. has_value_norm: a norm without weights of each head's
    values. values_are_keys: values are what the keys are before their norm and their rotation. keys_of: the earlier
    layer whose keys and values it attends to, in place of its own; -1: none. has_sinks: a learned score of each head
    takes part in the softmax and has no value (gpt-oss). has_output_gate: what a head gives is multiplied by the
    sigmoid of a product of its own (Qwen3-Next). query_scaling_beta: queries are multiplied by
    `1 + beta * log(1 + position // rope.original_max_position_embeddings)` (Llama 4); 0: they are not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    qk_norm: Literal["none", "head", "whole"] = "none"
    has_value_norm: bool = False
    values_are_keys: bool = False
    keys_of: int = -1
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    query_scaling_beta: float = 0.0

    @property
    def kv_shape(self) -> KVShape:
        """Of the keys that it attends to."""
        return KVShape(self.num_kv_heads, self.head_dim)

    @property
    def num_key_products(self) -> int:
        """Heads that it multiplies keys of."""
        return self.num_kv_heads if self.keys_of < 0 else 0

    @property
    def num_value_products(self) -> int:
        """Heads that it multiplies values of."""
        return 0 if self.values_are_keys else self.num_key_products


class ConvolutionSpec(Struct, frozen=True, kw_only=True):
    """A gated short convolution (LFM2): a product gives B, C and x of `num_channels` each; C * convolution(B * x).

    num_taps: how many tokens the convolution of a channel sees, the last ones. has_bias: of both products and of the
    convolution.
    """

    num_channels: int
    num_taps: int
    has_bias: bool = False

    @property
    def state_size(self) -> int:
        """Numbers that it keeps of a sequence: the last inputs of the convolution, [num_taps - 1, num_channels]."""
        return (self.num_taps - 1) * self.num_channels


class DeltaSpec(Struct, frozen=True, kw_only=True):
    """The gated delta rule (Yang et al., 2024) of each value head, over a short convolution of its inputs.

    A head keeps a matrix S [key_dim, value_dim]. For each token `S = decay * S`, then
    `S += beta * outer(key, value - key x S)`, and it gives `query x S`. Each query and key is of length 1, and serves
    as many value heads as there are for each key head: neighbours, or if `is_interleaved` in turns with the others'.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    is_interleaved: bool = False

    @property
    def keys_size(self) -> int:
        """Elements of all keys of a token, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.keys_size + self.values_size

    @property
    def state_size(self) -> int:
        """Numbers that it keeps of a sequence: as `ConvolutionSpec`, then the matrix of each head."""
        return (self.num_taps - 1) * self.num_channels + self.values_size * self.key_dim


RecurrentSpec = ConvolutionSpec | DeltaSpec


class FeedForwardSpec(Struct, frozen=True, kw_only=True):
    """A feed-forward part of `size` neurons. is_gated: the activation of one product is multiplied by another."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False


class ExpertsSpec(Struct, frozen=True, kw_only=True):
    """A mixture of experts (Shazeer et al., 2017): a router chooses `num_active` of `num_experts` for each token.

    Their outputs are added, each multiplied by its expert's share. routing: shares are the softmax or the sigmoid of
    the router's products. The largest are chosen; has_correction: after a number for each expert was added to them,
    which is not a part of the share (DeepSeek-V3). num_groups: of as many experts each, of which only those of
    `num_active_groups` take part in the choice, by the sum of their two largest. is_normalized: shares are divided by
    their sum, which counts as `min_sum` if it is less; so those of a softmax are the softmax of the chosen products
    alone. scaling: of all shares. has_scales: each share is then multiplied by a number of its expert. shared: a part
    that all tokens pass. has_shared_gate: what that gives is multiplied by the sigmoid of a product of its own, and has
    no bias (Qwen 2). has_norms: the router and the experts have a norm each of the residual stream, the router's times
    `router_multiplier`, and what the shared part and the experts give is normed before it is added up (Gemma 4).
    """

    num_experts: int
    num_active: int
    expert: FeedForwardSpec
    routing: Literal["softmax", "sigmoid"] = "softmax"
    has_router_bias: bool = False
    has_correction: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    is_normalized: bool = True
    min_sum: float = 0.0
    scaling: float = 1.0
    has_scales: bool = False
    shared: FeedForwardSpec | None = None
    has_shared_gate: bool = False
    has_norms: bool = False
    router_multiplier: float = 1.0


class LayerInputsSpec(Struct, frozen=True, kw_only=True):
    """What each layer adds to the residual stream of a token by its id and its embedding (Gemma 4).

    A token has `size` numbers for each layer, of an embedding of `vocab_size` rows and of a product of its residual
    stream before the first layer. At its end a layer multiplies the activation of a product by them.
    """

    size: int
    vocab_size: int
    activation: Activation


class LayerSpec(Struct, frozen=True, kw_only=True):
    """A layer over the residual stream.

    It has either `attention`, or `recurrent`, which keeps a state of each sequence. norms: before each of its two
    parts, after them, or both; `parallel`: one norm before both parts, which then do not see each other.
    residual_multiplier: of what each part adds to the stream. has_scale: the stream is multiplied by a number at the
    layer's end.
    """

    attention: AttentionSpec | None = None
    recurrent: RecurrentSpec | None = None
    feed_forward: FeedForwardSpec | ExpertsSpec
    norms: Literal["before", "after", "both", "parallel"] = "before"
    residual_multiplier: float = 1.0
    has_scale: bool = False

    @property
    def kv_shape(self) -> KVShape | None:
        """Of the keys and values that it stores; None if it stores none."""
        return None if self.attention is None or self.attention.keys_of >= 0 else self.attention.kv_shape

    @property
    def experts(self) -> ExpertsSpec | None:
        """The mixture of experts, if the layer has one."""
        return self.feed_forward if isinstance(self.feed_forward, ExpertsSpec) else None

    @property
    def dense(self) -> FeedForwardSpec | None:
        """What all tokens pass: the whole feed-forward part, or of a mixture of experts the shared one."""
        return self.feed_forward.shared if isinstance(self.feed_forward, ExpertsSpec) else self.feed_forward


class TensorNames(Struct, frozen=True, kw_only=True):
    """The names of a checkpoint's tensors, without `.weight` and `.bias`.

    Those of a layer follow `{prefix}layers.{number}.`; `embedding`, `final_norm` and those of the inputs of all layers
    follow `prefix`. Where `qkv` or a `gate_up` is given, the checkpoint has one matrix in place of three or two.
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    lm_head: str = "lm_head"
    #: Beginnings of the names of tensors that are left in the file: the other parts of multimodal models.
    ignored: tuple[str, ...] = ()
    #: Other beginnings of names, each with the one that it stands for.
    aliases: tuple[tuple[str, str], ...] = ()
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_out_norm: str = "post_feedforward_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str = ""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    #: Of what layers add by a token's id: the first three, of all layers, follow `prefix`.
    inputs_embedding: str = "embed_tokens_per_layer"
    inputs_projection: str = "per_layer_model_projection"
    inputs_norm: str = "per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_up: str = "per_layer_projection"
    input_out_norm: str = "post_per_layer_input_norm"
    layer_scale: str = "layer_scalar"
    output: str = "self_attn.o_proj"
    #: Of layers with a state. `mixed` is what is convolved: queries, keys and values, or B, C and x.
    recurrent_output: str = "linear_attn.out_proj"
    mixed: str = "linear_attn.in_proj_qkv"
    delta_gate: str = "linear_attn.in_proj_z"
    #: In place of these two, with the rows of each key head together.
    mixed_and_gate: str = ""
    delta_beta: str = "linear_attn.in_proj_b"
    delta_decay: str = "linear_attn.in_proj_a"
    beta_and_decay: str = ""
    taps: str = "linear_attn.conv1d"
    decay_rate: str = "linear_attn.A_log"
    decay_shift: str = "linear_attn.dt_bias"
    delta_scale: str = "linear_attn.norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_scale: str = "router.per_expert_scale"
    router_norm: str = "router.scale"
    experts_norm: str = "pre_feedforward_layernorm_2"
    shared_out_norm: str = "post_feedforward_layernorm_1"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    #: `{}` is the number of the expert.
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_gate_up: str = ""
    expert_down: str = "mlp.experts.{}.down_proj"
    #: How the experts of a layer lie in one tensor, if they do: `rows` [experts, out, in], `columns` [experts, in, out]
    #: with the columns of gate and up in turns. Those names are whole, without `{}`.
    stacking: Literal["", "rows", "columns"] = ""
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_gate_up: str = ""
    shared_down: str = "mlp.shared_experts.down_proj"
    #: What the sigmoid is taken of that multiplies the shared part.
    shared_scale: str = "mlp.shared_expert_gate"

    def without_alias(self, tensor: str) -> str:
        """The name of a tensor with the beginning that its own stands for."""
        alias, start = next((pair for pair in self.aliases if tensor.startswith(pair[0])), ("", ""))
        return start + tensor.removeprefix(alias)


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A decoder. `dtype` is the one that its weights are stored in; of quantized ones, the one to compute in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    #: Logits become `cap * tanh(logit / cap)`; 0: they stay as they are.
    logits_soft_cap: float = 0.0
    has_head_bias: bool = False
    #: Of a part of a model: whether it begins with token ids, else with a residual stream that it is given, and whether
    #: it ends with logits, else with the residual stream.
    has_embedding: bool = True
    has_lm_head: bool = True
    layer_inputs: LayerInputsSpec | None = None
    names: TensorNames = TensorNames()
    #: How a checkpoint may name its tensors as well: transformers 5 can save experts in one tensor.
    other_names: tuple[TensorNames, ...] = ()
    #: How a checkpoint's matrices are quantized, if they are.
    quantized: Method | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def attentions(self) -> dict[int, AttentionSpec]:
        """By the numbers of the layers that have one."""
        return {number: layer.attention for number, layer in enumerate(self.layers) if layer.attention is not None}

    @property
    def kv_shapes(self) -> tuple[KVShape | None, ...]:
        """Of the keys and values that each layer stores; None if it stores none."""
        return tuple(layer.kv_shape for layer in self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """That of the first layer that has one."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer, and of all if the model is plain, see `why_not_plain`."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, likewise."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head, likewise."""
        return self.attention.head_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings of the layers, in the order in which layers first have them."""
        ropes = (layer.attention.rope for layer in self.layers if layer.attention is not None)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def state_size(self) -> int:
        """Numbers, float32, that all layers keep of a sequence beside keys and values."""
        return sum(layer.recurrent.state_size for layer in self.layers if layer.recurrent is not None)


def why_not_on_gpus(model: ModelSpec) -> str:
    """What a model has that no forward pass on GPUs computes; empty if nothing."""
    if len(model.attentions) < model.num_layers:
        return "layers with a state in place of attention"
    if len({(attention.num_heads, attention.kv_shape) for attention in model.attentions.values()}) > 1:
        return "heads that differ by layer"
    if any(attention.keys_of >= 0 for attention in model.attentions.values()):
        return "layers that share keys and values"
    return ""


def why_not_plain(model: ModelSpec) -> str:
    """What a model has that Llama and Qwen3 do not have; empty if nothing. GPUs have a faster way for plain ones."""
    return why_not_on_gpus(model) or next(_extras(model), "")


def _extras(model: ModelSpec) -> Iterator[str]:
    if model.norm.kind != "rms" or model.norm.offset or not model.norm.has_weight:
        yield "norms of another kind"
    if (model.embedding_multiplier, model.logits_multiplier, model.logits_soft_cap) != (1.0, 1.0, 0.0):
        yield "scaled or capped embeddings or logits"
    if model.layer_inputs is not None or any(layer.has_scale for layer in model.layers):
        yield "layers with inputs or scales of their own"
    if model.has_head_bias:
        yield "a bias of the output matrix"
    if len(model.ropes) > 1:
        yield "rotary embeddings that differ by layer"
    for layer in model.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        assert attention is not None
        if isinstance(feed_forward, ExpertsSpec):
            yield "a mixture of experts"
        elif feed_forward.activation != "silu" or not feed_forward.is_gated:
            yield f"the activation {feed_forward.activation}{'' if feed_forward.is_gated else ' without a gate'}"
        if layer.norms != "before" or layer.residual_multiplier != 1.0:
            yield "norms or multipliers after the parts of a layer"
        if attention.window:
            yield "sliding windows"
        if attention.soft_cap or attention.has_sinks:
            yield "soft caps or sinks"
        if attention.has_output_gate:
            yield "gates behind attention"
        if attention.qk_norm == "whole":
            yield "a norm over all heads together"
        if attention.has_value_norm or attention.values_are_keys:
            yield "values that are normed or are the keys"
        if attention.scale != attention.head_dim**-0.5 or attention.query_scaling_beta:
            yield "attention scores of a scale of their own"
        if attention.rope is None:
            yield "layers without rotary embeddings"
        elif attention.rope.is_interleaved or 2 * attention.rope.num_turned != attention.head_dim:
            yield "rotary embeddings of neighbouring elements or of a part of a head"
