"""`GET /v1/models`, in the form of the client that asks."""

from __future__ import annotations

from aiohttp import web

from eventlm.errors import UnknownModelError
from eventlm.server.anthropic.models import is_from_anthropic_client, model_info, model_page
from eventlm.server.context import CONTEXT, ServerContext, json_response
from eventlm.server.model_card import model_card
from eventlm.server.openai.replies import Model, ModelList, ModelMeta


async def list_models(request: web.Request) -> web.Response:
    """The models that requests may name."""
    context = request.app[CONTEXT]
    if is_from_anthropic_client(request):
        return json_response(model_page(context))
    names = context.engine.model_names
    return json_response(
        ModelList(
            data=[_model(context.of_model(name), name) for name in names],
            models=[model_card(context.of_model(name), name) for name in names],
        )
    )


async def get_model(request: web.Request) -> web.Response:
    """One of the models."""
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    if name not in context.engine.model_names:
        raise UnknownModelError(name)
    return json_response((model_info if is_from_anthropic_client(request) else _model)(context.of_model(name), name))


def _model(context: ServerContext, name: str) -> Model:
    facts, max_model_len = context.facts, context.engine.max_model_len
    meta = ModelMeta(
        n_vocab=context.vocab_size if context.knows_tokens else 0,
        n_ctx_train=facts.context_length,
        n_embd=facts.embedding_size,
        n_params=facts.num_parameters,
        size=facts.num_bytes,
    )
    root = next(each for each in context.engine.model_names if context.of_model(each) is context.of_model(name))
    return Model(id=name, created=context.created, root=root, max_model_len=max_model_len, meta=meta)
