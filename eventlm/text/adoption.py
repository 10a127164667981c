"""Replies whose edges have died: their texts are searched for ends again, from the first output on."""

from __future__ import annotations

from collections.abc import Callable

from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import RequestHandle
from eventlm.engine.request_registry import Reply
from eventlm.text.generation import Generation
from eventlm.text.output_queue import OutputQueue
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import Formats


def adopt(engine: InferenceEngine, reply: Reply, text_of: Callable[[str], tuple[Tokenizer, Formats]]) -> Generation:
    """The text of an orphan. It must be read to its end. text_of: of a model, its tokenizer and its formats."""
    outputs = OutputQueue()
    tokenizer, formats = text_of(reply.group[0].scheduling.model)
    handles = [
        RequestHandle(seq, request.n, engine.end_text, engine.cancel)
        for seq, request in zip(reply.requests, reply.group, strict=True)
    ]
    reply.adopt(outputs.put)
    return Generation(tokenizer, reply.group, handles, outputs, formats, now_ns=engine.now_ns)


async def read_to_the_end(generation: Generation) -> None:
    """Read what nobody waits for. Raises what the engine raises."""
    async for _ in generation.outputs():
        pass
