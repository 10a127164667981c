"""Makes a model in transformers without its weights, and runs it once to see how it attends. Start it with

    python -m eventlm.models.transformers_probe FOLDER

It prints a `TransformersModel`, or a `Refusal` with the reason. A worker, which loads transformers anyway, calls
`probe_model`.

In the pass all tensors are on torch's `meta` device: they have shapes and no values. The masks that the model makes
for its attention are functions of positions, which tell windows from anything else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.models.transformers_model import AttentionCall, Refusal, TransformersModel, in_one_line

#: By this name the attention and the masks are known to transformers.
_NAME = "eventlm_probe"
_NUM_TOKENS = 4
#: Of a mask, so many positions are looked at.
_MOST_POSITIONS = 1 << 20
#: Tensors that a model may pass to its attention beside queries, keys and values.
_KNOWN_TENSORS = ("position_ids", "cache_position", "s_aux")
_NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"
#: With these the rotation of a token depends on the other sequences of its step.
_ROPES_OF_THE_LONGEST = ("dynamic", "longrope")


class _RefusedError(Exception):
    """The model cannot be computed; why."""


class _Mask(NamedTuple):
    """A mask that the model made, and what it lets a query see: (position, positions) to booleans."""

    mask: Tensor
    sees: Callable[[int, Tensor], Tensor]


class _Recorder:
    """What the model does in a pass."""

    def __init__(self, num_positions: int) -> None:
        self.calls: list[AttentionCall] = []
        self._masks: list[_Mask] = []
        self._num_positions = min(num_positions, _MOST_POSITIONS)

    def make_mask(self, *, mask_function: Callable[..., Any], q_length: int, kv_length: int, **_: Any) -> Tensor:
        """In the place of transformers' functions that make masks."""
        mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")

        def sees(query: int, positions: Tensor) -> Tensor:
            zero = torch.tensor(0)
            return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), positions)).expand(positions.shape)

        self._masks.append(_Mask(mask, sees))
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """In the place of transformers' attention."""
        _check_shapes(query, key, value)
        for name, given in options.items():
            if isinstance(given, Tensor) and name not in _KNOWN_TENSORS:
                raise _RefusedError(f"its attention takes {name}, as sparse or biased attention does")
        if attention_mask is not None:
            window = self._window_of(attention_mask)
        else:
            is_causal = options.get("is_causal")
            if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
                raise _RefusedError("its attention is not causal")
            window = options.get("sliding_window") or 0
        call = AttentionCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            window=window,
        )
        self.calls.append(call)
        return value.new_empty((1, query.shape[2], query.shape[1], value.shape[3])), None

    def _window_of(self, mask: Tensor) -> int:
        sees = next((each.sees for each in self._masks if each.mask is mask), None)
        if sees is None:
            raise _RefusedError("it makes masks of its own")
        positions = torch.arange(self._num_positions)
        last, middle = self._num_positions - 1, self._num_positions // 2
        try:
            window = int(sees(last, positions).sum())
            is_window = all(
                torch.equal(sees(query, positions), (positions <= query) & (positions > query - window))
                for query in (last, middle)
            )
        except (RuntimeError, IndexError):
            # It is made of more than positions.
            is_window = False
        if not is_window:
            raise _RefusedError("its attention is neither causal nor in a window")
        return window if window < self._num_positions else 0


def probe_model(folder: Path) -> TransformersModel:
    """The model in `folder` as transformers makes it. Raises CheckpointError with the reason if it cannot be run."""
    path = folder / "config.json"
    values = read_json_object(path)
    try:
        return _probe(folder, values)
    except _RefusedError as error:
        name = (values.get("architectures") or [values.get("model_type")])[0]
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot serve {name} here: {error}"
        ) from error


def _probe(folder: Path, values: dict[str, Any]) -> TransformersModel:
    config = _config(folder, values)
    text = config.get_text_config(decoder=True)
    num_positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(num_positions, int) or num_positions < 1:
        raise _RefusedError("its config names no max_position_embeddings")
    recorder = _Recorder(num_positions)
    with _attention(recorder):
        model = _make(config)
        _check_model(model, values)
        body, hidden, logits = _run(model)
    if not recorder.calls:
        raise _RefusedError("it does not attend")
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return TransformersModel(
        architecture=type(model).__name__,
        vocab_size=logits.shape[-1],
        hidden_size=hidden.shape[-1],
        max_position_embeddings=num_positions,
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else "",
        # A tied output matrix counts, too: it is packed for the compiled products.
        num_weights=sum(weight.numel() for _, weight in model.named_parameters(remove_duplicate=False)),
        body=body,
        layers=tuple(recorder.calls),
    )


def _config(folder: Path, values: dict[str, Any]) -> Any:
    """Of what transformers knows. Raises _RefusedError."""
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        if values.get("auto_map"):
            raise _RefusedError("it needs code of its own (auto_map), and such code is not run")
        raise _RefusedError(f"model_type {kind!r} is not known to it")
    for key in ("quantization_config", "compression_config", "quantization"):
        if values.get(key):
            raise _RefusedError(f"its weights are quantized ({key}); take the ones in bfloat16 or float16")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _RefusedError(f"it cannot read the config: {_described(error)}") from error
    if config.is_encoder_decoder:
        raise _RefusedError("it is an encoder with a decoder")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _RefusedError(f"of model_type {kind} it has no causal language model")
    text = config.get_text_config(decoder=True)
    for layer_type in getattr(text, "layer_types", None) or []:
        if not layer_type.endswith("attention") or "linear" in layer_type:
            raise _RefusedError(f"it has layers that keep a state ({layer_type})")
    limit = getattr(text, "max_position_embeddings", 0)
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        kind = rope.get("rope_type")
        if kind in _ROPES_OF_THE_LONGEST and limit > rope.get("original_max_position_embeddings", 0):
            raise _RefusedError(f"with rope_type {kind} a token's rotation depends on the other sequences of its step")
    return config


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The rotary embeddings of a config: one, or one for each kind of layer."""
    if isinstance(parameters, dict):
        yield parameters
        for each in parameters.values():
            yield from _ropes(each)


def _make(config: Any) -> Any:
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=_NAME, experts_implementation="batched_mm"
            )
    except Exception as error:
        # Some models have a table of attentions of their own, by these names.
        is_unknown = isinstance(error, KeyError) and error.args == (_NAME,)
        raise _RefusedError(
            _NO_INTERFACE if is_unknown else f"it cannot make the model: {_described(error)}"
        ) from error
    return model.eval()


def _check_model(model: Any, values: dict[str, Any]) -> None:
    made, named = type(model).__name__, (values.get("architectures") or [""])[0]
    if named != made and hasattr(transformers, named):
        raise _RefusedError("it is no causal language model")
    if model._is_stateful:
        raise _RefusedError("it has layers that keep a state")
    if not model._supports_attention_backend:
        raise _RefusedError(_NO_INTERFACE)


def _run(model: Any) -> tuple[str, Tensor, Tensor]:
    """The module that the output matrix follows, by name, what it gives, and logits."""
    ran: list[tuple[str, Any]] = []
    parts = {
        name: part for name, part in model.named_modules() if name and isinstance(part, transformers.PreTrainedModel)
    }
    hooks = [
        part.register_forward_hook(lambda _, inputs, output, name=name: ran.append((name, output)))
        for name, part in parts.items()
    ]
    ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    try:
        with torch.no_grad():
            # Given a mask of ones, transformers looks for no sequences in the row, which would need values.
            logits = model(
                input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits
    except _RefusedError:
        raise
    except Exception as error:
        raise _RefusedError(f"its forward pass cannot be followed without weights: {_described(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not ran:
        raise _RefusedError("it has no decoder of its own beside the output matrix")
    # Of nested ones the outermost ends last.
    body, output = ran[-1]
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules()):
        raise _RefusedError("it counts positions in a way of its own")
    if "position_ids" not in inspect.signature(parts[body].forward).parameters:
        raise _RefusedError("its decoder does not take position_ids")
    return body, output[0], logits


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """[1, heads, tokens, head size] of the tokens of the pass."""
    fit = (
        all(each.dim() == 4 and each.shape[0] == 1 and each.shape[2] == _NUM_TOKENS for each in (query, key, value))
        and key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] == key.shape[3]
    )
    if not fit:
        shapes = ", ".join(str(list(each.shape)) for each in (query, key, value))
        raise _RefusedError(f"queries, keys and values have shapes {shapes}, not those of a row of tokens")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"


@contextmanager
def _attention(recorder: _Recorder) -> Iterator[None]:
    """Within it, a model whose attention is named so is recorded."""
    transformers.AttentionInterface.register(_NAME, recorder.attend)
    transformers.AttentionMaskInterface.register(_NAME, recorder.make_mask)
    try:
        yield
    finally:
        del transformers.AttentionInterface._global_mapping[_NAME]
        del transformers.AttentionMaskInterface._global_mapping[_NAME]


def main() -> int:
    """Entry point of the process."""
    transformers.logging.set_verbosity_error()
    found: TransformersModel | Refusal
    try:
        found = probe_model(Path(sys.argv[1]))
    except CheckpointError as error:
        found = Refusal(str(error))
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
