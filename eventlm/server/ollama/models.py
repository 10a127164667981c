"""What Ollama's clients read of models: `/api/tags`, `/api/show`, `/api/ps` and `/api/version`."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import Struct

from eventlm.errors import MissingParameterError
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body
from eventlm.server.model_card import ModelCard, ModelDetails, capabilities, digest, model_card, model_details, rfc3339
from eventlm.server.ollama.options import LATEST, served_name
from eventlm.text.decoding import decode_request

#: The version of Ollama's API that is spoken here. Clients look whether it is new enough for what they use.
API_VERSION = "0.12.11"
#: Models stay loaded; clients show this as "forever".
_NEVER = "9999-12-31T23:59:59Z"


class OllamaModels(Struct, frozen=True):
    """Reply of `/api/tags`."""

    models: list[ModelCard]


class RunningModel(Struct, frozen=True, kw_only=True):
    """A model in memory. expires_at: never, in effect."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    context_length: int


class RunningModels(Struct, frozen=True):
    """Reply of `/api/ps`."""

    models: list[RunningModel]


class OllamaShowRequest(Struct, kw_only=True):
    """Body of `POST /api/show`. `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None


class OllamaShowReply(Struct, frozen=True, kw_only=True):
    """Reply of `/api/show`.

    template: Jinja, as in the model's folder. parameters: the defaults of requests, one a line. model_info: by GGUF's
    names.
    """

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct, frozen=True):
    """Reply of `/api/version`: the version of Ollama's API, not of this server."""

    version: str


async def ollama_tags(request: web.Request) -> web.Response:
    """The models that requests may name, in Ollama's shapes."""
    context = request.app[CONTEXT]
    return json_response(
        OllamaModels([model_card(context.of_model(name), _tagged(name)) for name in context.engine.model_names])
    )


async def ollama_ps(request: web.Request) -> web.Response:
    """The models in memory, which are all."""
    context = request.app[CONTEXT]
    names = [_tagged(name) for name in context.engine.model_names] if context.engine.state == "ready" else []
    return json_response(
        RunningModels([
            RunningModel(
                name=name,
                model=name,
                size=context.of_model(name).facts.num_bytes,
                digest=digest(context.of_model(name), name),
                details=model_details(context.of_model(name)),
                expires_at=_NEVER,
                context_length=context.of_model(name).engine.max_model_len,
            )
            for name in names
        ])
    )  # fmt: skip


async def ollama_show(request: web.Request) -> web.Response:
    """What is known of a model."""
    context = request.app[CONTEXT]
    body = decode_request(await read_body(request, any_type=True), OllamaShowRequest, {})
    asked = body.model or body.name
    if not asked:
        raise MissingParameterError("model")
    name = served_name(context, asked)
    context = context.of_model(name)
    template = context.tokenizer.chat_template
    return json_response(
        OllamaShowReply(
            modelfile=f"FROM {name}\n",
            parameters=_parameters(context),
            template=template.source if template is not None else "{{ prompt }}",
            details=model_details(context),
            model_info=_model_info(context, name),
            capabilities=capabilities(context),
            modified_at=rfc3339(context.created),
        )
    )


async def ollama_version(request: web.Request) -> web.Response:
    """The version of Ollama's API that is spoken here."""
    return json_response(OllamaVersion(API_VERSION))


def _tagged(name: str) -> str:
    """A name as Ollama lists it, with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _parameters(context: ServerContext) -> str:
    defaults = context.defaults
    values = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    return "\n".join(f"{name:<30} {value}" for name, value in values.items())


def _model_info(context: ServerContext, name: str) -> dict[str, Any]:
    facts, family = context.facts, context.facts.family
    return {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": facts.num_parameters,
        # What is served, which may be less than the model was made for.
        f"{family}.context_length": context.engine.max_model_len,
        f"{family}.embedding_length": facts.embedding_size,
        f"{family}.block_count": facts.num_layers,
        f"{family}.vocab_size": context.vocab_size if context.knows_tokens else 0,
        "tokenizer.ggml.eos_token_id": context.tokenizer.eos_token_id,
    }
