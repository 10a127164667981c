"""How the tensors of a checkpoint are named, and which weights each holds. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable

from eventlm.models.program import WeightKey
from eventlm.models.spec import ModelSpec, TensorNames
from eventlm.models.weights.decoder_weights import model_weights

#: Weights of the whole model, whose names follow `TensorNames.prefix`.
_OF_THE_WHOLE = ("embedding", "final_norm", "inputs_embedding", "inputs_projection", "inputs_norm")
#: Those that are no module with a weight.
_WITHOUT_MODULE = (
    *("sinks", "correction", "decay_rate", "decay_shift"),
    *("layer_scale", "expert_scale", "router_norm"),
)


def checkpoint_tensors(
    model: ModelSpec, names: TensorNames | None = None, keys: Iterable[WeightKey] | None = None
) -> dict[str, list[WeightKey]]:
    """The name of each tensor of the decoder in a checkpoint, and the weights that its rows are, in their order.

    names: the model's own by default. keys: of the weights, all by default.
    """
    tensors: dict[str, list[WeightKey]] = {}
    for key in model_weights(model) if keys is None else keys:
        tensors.setdefault(tensor_name(key, model, names or model.names), []).append(key)
    return tensors


def tensor_name(key: WeightKey, model: ModelSpec, names: TensorNames) -> str:
    """The name of the tensor that holds a weight."""
    owner, kind = "", f".{key.kind}"
    if key.expert >= 0:
        owner = "expert_"
        if names.stacking:
            kind = "_bias" if key.kind == "bias" else ""
    elif key.name in ("gate", "up", "down") and model.layers[key.layer].experts is not None:
        owner = "shared_"
    elif key.name in _WITHOUT_MODULE:
        kind = ""
    elif key.name == "output" and model.layers[key.layer].recurrent is not None:
        owner = "recurrent_"
    # Each head's query and gate are rows of one matrix.
    name: str = names.query if key.name == "output_gate" else getattr(names, owner + key.name)
    if key.name in ("query", "key", "value"):
        name = names.qkv or name
    elif key.name in ("gate", "up"):
        name = getattr(names, f"{owner}gate_up") or name
    elif key.name in ("mixed", "delta_gate"):
        name = names.mixed_and_gate or name
    elif key.name in ("delta_beta", "delta_decay"):
        name = names.beta_and_decay or name
    name = name.replace("{}", str(key.expert))
    if key.name == "lm_head":
        return name + kind
    return names.prefix + (name if key.name in _OF_THE_WHOLE else f"layers.{key.layer}.{name}") + kind
