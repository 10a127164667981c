from __future__ import annotations

import math

import pytest
import torch
from msgspec import structs

from eventlm.models.decoder import Decoder
from eventlm.models.loader import default_dtype, torch_dtype
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.weight_bytes import weight_bytes
from tests.models.weights.tensors import MODEL, SHARED, SPARSE, tensors_of


def test_they_are_those_of_the_tensors() -> None:
    num_parameters = sum(math.prod(shape) for _, shape in tensors_of(MODEL).values())
    assert weight_bytes(MODEL, "bfloat16") == 2 * num_parameters
    assert weight_bytes(MODEL, "float32") == 4 * num_parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", [MODEL, SPARSE, SHARED])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_take_what_the_decoder_has_for_them(quantization: str, model: ModelSpec, *, tied: bool) -> None:
    model = structs.replace(model, tie_word_embeddings=tied, hidden_size=80)
    with default_dtype(torch_dtype("bfloat16")), torch.device("meta"):
        decoder = Decoder(model)
    if quantization == "int8":
        decoder.to_int8()
    tensors = {id(each): each for each in (*decoder.weights.values(), *decoder.scales.values())}
    assert weight_bytes(model, "bfloat16", quantization) == sum(each.nbytes for each in tensors.values())
