"""What HTTP and text processing need of a model: tokenizer, defaults and facts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.models.facts import ModelFacts, read_facts
from eventlm.models.served import read_served
from eventlm.sampling_params import SamplingParams
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from eventlm.text.generation_config import load_generation_defaults
from eventlm.text.tokenizer import CheckpointTokenizer, Tokenizer
from eventlm.types import ModelImpl
from eventlm.worker.fake.extras import FAKE_EMBEDDING_SIZE
from eventlm.worker.protocol import FAKE_MODEL


class TextParts(NamedTuple):
    """The model's tokenizer, the defaults of its requests, and the facts that the server reports about it. forwards:
    whether other servers run it.
    """

    tokenizer: Tokenizer
    defaults: SamplingParams
    facts: ModelFacts
    forwards: bool = False


class ServedText(NamedTuple):
    """A replicaset's names for requests, its tokenizer with defaults and facts, and its vocabulary's size."""

    model_names: list[str]
    text: TextParts
    vocab_size: int
    num_slots: int


def load_text(model: str, impl: ModelImpl, tokenizer_folder: str = "") -> TextParts:
    """Of a checkpoint folder that `impl` computes, with the tokenizer in another if given, of the fake model, or, where
    `model` is empty, of backends: then the tokenizer is the fake one or in a folder too, and without one texts are cut
    into pieces.

    Raises CheckpointError.
    """
    if not model:
        return TextParts(_tokenizer_of_backends(tokenizer_folder), SamplingParams(), ModelFacts(0, ""), forwards=True)
    if model == FAKE_MODEL:
        fake = FakeTokenizer()
        assert fake.eos_token_id is not None
        return TextParts(fake, SamplingParams(eos_token_ids=(fake.eos_token_id,)), ModelFacts(FAKE_EMBEDDING_SIZE))
    folder = Path(model)
    tokenizer = CheckpointTokenizer(Path(tokenizer_folder) if tokenizer_folder else folder)
    facts = read_facts(folder, read_served(folder, impl))
    return TextParts(tokenizer, load_generation_defaults(folder, tokenizer), facts)


def _tokenizer_of_backends(name: str) -> Tokenizer:
    if not name:
        return PieceTokenizer()
    return FakeTokenizer() if name == FAKE_MODEL else CheckpointTokenizer(Path(name))
