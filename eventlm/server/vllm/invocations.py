"""`POST /invocations`: SageMaker's one endpoint for all kinds of bodies."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from eventlm.errors import InputError
from eventlm.server.answer import answer
from eventlm.server.api import Api
from eventlm.server.context import read_body
from eventlm.server.openai.chat import CHAT
from eventlm.server.openai.completions import COMPLETIONS
from eventlm.server.openai.embeddings import EMBEDDINGS
from eventlm.text.decoding import decode_object

#: The APIs by the field that only their bodies have.
_APIS: dict[str, Api[Any]] = {"messages": CHAT, "prompt": COMPLETIONS, "input": EMBEDDINGS}


async def invocations(request: web.Request) -> web.StreamResponse:
    """A chat if the body has `messages`, a completion if it has `prompt`, and embeddings if it has `input`."""
    raw = decode_object(await read_body(request))
    api = next((api for field, api in _APIS.items() if raw.get(field) is not None), None)
    if api is None:
        raise InputError(None, "The body needs 'messages' (a chat), 'prompt' (a completion) or 'input' (embeddings).")
    return await answer(request, api)
