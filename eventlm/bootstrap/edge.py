"""An HTTP edge, in the engine's process or in a front end."""

from __future__ import annotations

from eventlm.bootstrap.text_parts import TextParts
from eventlm.config import Config
from eventlm.server.auth.api_keys import ApiKeys
from eventlm.server.context import ServerContext
from eventlm.server.engine_protocol import Engine


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
