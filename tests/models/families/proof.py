"""Proves on a tiny random checkpoint, which transformers makes, that its architecture is computed as transformers does.

Windows are shorter than the prompts, heads share keys, and norms, biases and corrections are random.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.kernels.cpu import native
from eventlm.kernels.sequence_states import StateRow, StepStates
from eventlm.models import decoder as decoder_module
from eventlm.models.config import read_model
from eventlm.models.decoder import Attention, Decoder
from eventlm.models.experts import Chosen, route
from eventlm.models.loader import load_decoder
from eventlm.models.rope import rope_tables
from eventlm.models.spec import DeltaSpec, ModelSpec
from tests.kernels.cpu.decoders import relative_error
from tests.worker.launches import new_sequence
from tests.worker.reference import Key, Schedule, make_runner

VOCAB_SIZE = 160

#: The fastest build in which a row's bits do not depend on its neighbours.
STABLE_BUILD = next((build for build in native.available_builds() if build != "amx"), "torch")
#: What cases have unless they say otherwise.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: Of logits in float32, as a share of the largest.
TOLERANCE = 1e-5
#: How much further from float32 logits in bfloat16 may be than those of transformers in bfloat16. Compiled passes round
#: less often than it does; torch's rounds as often, but not the same numbers.
BFLOAT16_BOUNDS = {"torch": 1.1, **dict.fromkeys(native.available_builds(), 0.9)}
LENGTHS = (1, 24, 45)


def make_checkpoint(folder: Path, architecture: str, **fields: Any) -> Any:
    """Save a checkpoint of an architecture to `folder`. Returns transformers' model of it, in float32.

    bfloat16 holds its weights exactly.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**fields)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.normal_(std=0.3)
                elif "norm" in name or name.endswith("scale"):
                    weight.add_(torch.empty_like(weight).uniform_(-0.5, 0.5))
                weight.copy_(weight.bfloat16())
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.normal_(std=0.3)
                elif name.endswith("layer_scalar"):
                    buffer.copy_(torch.empty_like(buffer).uniform_(0.5, 1.5).bfloat16())
    model.save_pretrained(folder)
    return model


def prove(folder: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, **fields: Any) -> None:
    """Logits of whole prompts, tokens and logits of a worker's steps, in float32 and in bfloat16.

    fields: of the config, beside SMALL.
    """
    exact = make_checkpoint(folder, architecture, **SMALL | fields)
    rng = random.Random(3)
    prompts: dict[Key, list[int]] = {
        (number, 0): [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for number, length in enumerate(LENGTHS)
    }
    with monkeypatch.context() as patch:
        check_whole_prompt(folder, exact, prompts[2, 0], patch)
    with monkeypatch.context() as patch:
        schedule = serve(folder, prompts, patch, 64, dtype="float32")
    check_tokens(exact, prompts, schedule)
    rounded = type(exact).from_pretrained(folder, dtype=torch.bfloat16).eval()
    has_experts = any(layer.experts is not None for layer in read_model(folder).layers)
    for path, bound in BFLOAT16_BOUNDS.items():
        with monkeypatch.context() as patch:
            schedule = serve(folder, prompts, patch, 32, dtype="bfloat16", block_size=16, cpu_kernels=path)
        error, rounded_error = errors(exact, rounded, prompts, schedule, is_median=has_experts)
        assert error <= bound * rounded_error, path


@torch.inference_mode()
def check_whole_prompt(folder: Path, exact: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of all tokens of a prompt, by the decoder alone, and the experts that it chose in each layer."""
    found: list[Tensor] = []
    wanted: list[Tensor] = []

    def recorded(*args: Any) -> Chosen:
        chosen = route(*args)
        found.append(chosen.experts_TA)
        return chosen

    monkeypatch.setattr(decoder_module, "route", recorded)
    decoder = load_decoder(folder, dtype="float32")
    model = decoder.model
    ropes = rope_tables(model, 256, dtype=torch.float32, device=torch.device("cpu"))
    states = StepStates(torch.full((1, model.state_size), torch.nan), [StateRow(len(prompt), slot=0, source=-1)])
    attend = whole_attention(decoder)
    hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), ropes, attend, states=states)
    for module in exact.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, inputs, outputs: wanted.append(outputs[2].sort(-1)[0]))
    output = exact(torch.tensor([prompt]), use_cache=True)
    check_near(decoder.logits(hidden), output.logits[0], tolerance_of(model))
    check_states(model, states.memory[0], output.past_key_values)
    assert len(found) == len(wanted) == sum(layer.experts is not None for layer in model.layers)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def check_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """`found` differs from what is expected by less than a share of the largest."""
    assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())


def tolerance_of(model: ModelSpec) -> float:
    """Of logits. Transformers sums up 64 tokens of the delta rule at once, in an order of its own."""
    return 5 * TOLERANCE if any(isinstance(layer.recurrent, DeltaSpec) for layer in model.layers) else TOLERANCE


def check_states(model: ModelSpec, state: Tensor, cache: Any) -> None:
    """What the layers keep of a sequence is what transformers keeps."""
    for number, layer in enumerate(model.layers):
        if (spec := layer.recurrent) is None:
            continue
        own, state = state.split((spec.state_size, len(state) - spec.state_size))
        num_inputs = (spec.num_taps - 1) * spec.num_channels
        last = cache.get_conv_state(number, state_idx=0)[0, :, 1 - spec.num_taps :]
        check_near(own[:num_inputs].view(-1, spec.num_channels), last.t(), tolerance_of(model))
        if isinstance(spec, DeltaSpec):
            matrices = cache.get_recurrent_state(number, state_idx=0)[0]
            check_near(own[num_inputs:].view(matrices.shape), matrices, tolerance_of(model))
    assert not len(state)


def whole_attention(decoder: Decoder) -> Attention:
    """The attention of a sequence from its beginning, as each layer's `AttentionSpec` describes it."""

    stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
        spec, sinks_H = decoder.model.layers[layer].attention, decoder.sinks[layer]
        if k_TKD is not None and v_TKD is not None:
            stored[layer] = k_TKD, v_TKD
        k_TKD, v_TKD = stored[layer if spec.keys_of < 0 else spec.keys_of]
        group = spec.num_heads // spec.num_kv_heads
        k_THD, v_THD = k_TKD.repeat_interleave(group, dim=1), v_TKD.repeat_interleave(group, dim=1)
        scores_HTT = spec.scale * torch.einsum("thd,shd->hts", q_THD, k_THD)
        if spec.soft_cap:
            scores_HTT = spec.soft_cap * torch.tanh(scores_HTT / spec.soft_cap)
        positions_T = torch.arange(len(q_THD))
        distances_TT = positions_T[:, None] - positions_T
        is_hidden_TT = (distances_TT < 0) | (distances_TT >= (spec.window or len(q_THD)))
        scores_HTT = scores_HTT.masked_fill(is_hidden_TT, -torch.inf)
        if sinks_H is not None:
            scores_HTT = torch.cat((scores_HTT, sinks_H[:, None, None].expand(-1, len(q_THD), 1)), dim=-1)
        return torch.einsum("hts,shd->thd", scores_HTT.softmax(-1)[..., : len(q_THD)], v_THD)

    return attend


def serve(
    folder: Path, prompts: dict[Key, list[int]], monkeypatch: pytest.MonkeyPatch, num_tokens: int, **options: Any
) -> Schedule:
    """`num_tokens` and more of each prompt. They come whole and in chunks, while the first of them decode."""
    has_states = options.get("model_impl") != "transformers" and read_model(folder).state_size > 0
    # Every other slot keeps a copy.
    options |= {"state_slots": 2 * len(prompts)} if has_states else {}
    schedule = Schedule(make_runner(folder, **{"max_model_len": 256} | options), monkeypatch)
    blocks = list(range(32 * len(prompts)))
    random.Random(5).shuffle(blocks)
    for number, (key, prompt) in enumerate(prompts.items()):
        first = min(17, len(prompt))
        chunks = [(first, len(prompt))] if first < len(prompt) else []
        for index, (start, end) in enumerate([(0, first), *chunks]):
            decodes = [(*other, len(prompts[other]) + len(got), 0) for other, got in schedule.outputs.items()]
            states = state_of_chunk(len(decodes), 2 * number, start, end) if has_states else []
            schedule.step(
                new=[] if index else [new_sequence(key[0], prompt)],
                decodes=decodes,
                chunks=[(*key, start, end - start, int(end == len(prompt)))],
                blocks=[] if index else [(len(decodes), 0, blocks[number * 32 : number * 32 + 32])],
                states=states,
            )
    while late := [key for key, got in schedule.outputs.items() if len(got) < num_tokens]:
        schedule.step(decodes=[(*key, len(prompts[key]) + len(schedule.outputs[key]), 0) for key in late])
    return schedule


def state_of_chunk(row: int, slot: int, start: int, end: int) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
    """The first keeps a copy of the state in the slot after its own, in which the next begins."""
    return [(row, slot, slot + 1, []) if start else (row, slot, -1, [(end, slot + 1)])]


@torch.inference_mode()
def check_tokens(exact: Any, prompts: dict[Key, list[int]], schedule: Schedule) -> None:
    """The tokens are those that transformers generates, each the likeliest behind those before; the logits are near."""
    for key, prompt in prompts.items():
        output = schedule.outputs[key]
        expected = exact(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert output == expected.argmax(dim=-1).tolist(), key
        check_near(torch.stack(schedule.logits[key]), expected, tolerance_of(schedule.runner.config))


@torch.inference_mode()
def errors(
    exact: Any, rounded: Any, prompts: dict[Key, list[int]], schedule: Schedule, *, is_median: bool
) -> list[float]:
    """Root mean square of the error of all logits, relative, of a schedule and of transformers in bfloat16.

    is_median: the median of that of each token. Some tokens pass other experts when numbers are rounded, and differ far
    more than the others.
    """
    wanted, found, of_rounded = [], [], []
    for key, prompt in prompts.items():
        ids = torch.tensor([prompt + schedule.outputs[key][:-1]])
        wanted.append(exact(ids).logits[0, len(prompt) - 1 :])
        found.append(torch.stack(schedule.logits[key]).float())
        of_rounded.append(rounded(ids).logits[0, len(prompt) - 1 :].float())
    pairs = [(torch.cat(logits), torch.cat(wanted)) for logits in (found, of_rounded)]
    if not is_median:
        return [relative_error(*pair) for pair in pairs]
    of_tokens = [[relative_error(*of_token) for of_token in zip(*pair, strict=True)] for pair in pairs]
    return [statistics.median(each) for each in of_tokens]
