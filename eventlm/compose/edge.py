"""What an HTTP edge is made of, in the engine's process or in a front end."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.config import Config
from eventlm.models.config import read_config
from eventlm.server.api_keys import ApiKeys
from eventlm.server.context import ServerContext
from eventlm.server.engine_protocol import Engine
from eventlm.server.fake_tokenizer import FakeTokenizer
from eventlm.server.generation_config import GenerationDefaults, load_generation_defaults
from eventlm.server.tokenizer import CheckpointTokenizer, Tokenizer
from eventlm.worker.fake_extras import FAKE_EMBEDDING_SIZE
from eventlm.worker.protocol import FAKE_MODEL


class TextParts(NamedTuple):
    """How a model's text and tokens belong together, what a request gets that does not say otherwise, and the size of
    a pooled prompt.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    embedding_size: int


def load_text(model: str) -> TextParts:
    """Of a checkpoint folder, or of the fake model. Raises CheckpointError."""
    if model == FAKE_MODEL:
        fake = FakeTokenizer()
        assert fake.eos_token_id is not None
        return TextParts(fake, GenerationDefaults(eos_token_ids=(fake.eos_token_id,)), FAKE_EMBEDDING_SIZE)
    folder = Path(model)
    tokenizer = CheckpointTokenizer(folder)
    return TextParts(tokenizer, load_generation_defaults(folder, tokenizer), read_config(folder).hidden_size)


def make_context(
    engine: Engine,
    config: Config,
    text: TextParts,
    *,
    vocab_size: int,
    keys: ApiKeys | None = None,
    engine_pid: int | None = None,
    created: int | None = None,
) -> ServerContext:
    """A server's context, as the configuration wants it. Raises UsageError if the API keys cannot be read."""
    return ServerContext(
        engine,
        text.tokenizer,
        config.server,
        defaults=text.defaults,
        vocab_size=vocab_size,
        embedding_size=text.embedding_size,
        keys=keys,
        classes=config.classes,
        engine_pid=engine_pid,
        created=created,
    )
