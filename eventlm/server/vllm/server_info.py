"""What vLLM's servers say of themselves: `/load`, `/server_info` and `/tokenizer_info`."""

from __future__ import annotations

from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from eventlm.config.load import redacted, to_toml
from eventlm.errors import InputError
from eventlm.server.context import CONTEXT, json_response

#: How `/server_info` may write the configuration.
ConfigFormat = Literal["text", "json"]


class ServerLoad(Struct, frozen=True):
    """Reply of `/load`: how many requests generate at the moment, over all processes that serve HTTP."""

    server_load: int


class ServerInfo(Struct, frozen=True):
    """Reply of `/server_info`: the configuration as TOML or by section and option, under vLLM's name for it."""

    vllm_config: str | dict[str, Any]


async def load(request: web.Request) -> web.Response:
    """How many requests generate at the moment."""
    context = request.app[CONTEXT]
    figures = await context.engine.read_metrics()
    if not figures.front_ends:
        return json_response(ServerLoad(context.num_running))
    return json_response(ServerLoad(sum(each.num_requests for each in figures.front_ends)))


async def server_info(request: web.Request) -> web.Response:
    """The configuration of the server, without its secrets."""
    config = request.app[CONTEXT].whole_config
    form = request.query.get("config_format", "text")
    if form not in ("text", "json"):
        raise InputError("config_format", "Invalid value for 'config_format': supported values are 'text' and 'json'.")
    return json_response(ServerInfo(to_toml(config) if form == "text" else redacted(config)))


async def tokenizer_info(request: web.Request) -> web.Response:
    """The tokenizer's configuration and its chat template, if the server runs with --tokenizer-info."""
    context = request.app[CONTEXT]
    if not context.config.tokenizer_info:
        raise web.HTTPNotFound
    tokenizer = context.tokenizer
    template = tokenizer.chat_template
    return json_response(
        {
            # Paths are the server's own business.
            **{key: value for key, value in tokenizer.config.items() if not key.endswith(("_file", "_path"))},
            "tokenizer_class": tokenizer.config.get("tokenizer_class") or type(tokenizer).__name__,
            "chat_template": None if template is None else template.source,
        }
    )
