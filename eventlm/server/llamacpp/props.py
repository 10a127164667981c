"""What llama.cpp's clients read of a server: `/props`, `/slots` and `/lora-adapters`."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from eventlm._version import __version__
from eventlm.engine.admin import ReadStatus
from eventlm.server.context import CONTEXT, json_response
from eventlm.server.errors import unavailable
from eventlm.server.llamacpp.settings import GenerationSettings, generation_settings

FAIL_ON_NO_SLOT = "fail_on_no_slot"


class Slot(Struct, frozen=True, kw_only=True):
    """Room for a sequence. n_ctx: its longest context. The busy ones come first; a sequence has none of its own."""

    id: int
    n_ctx: int
    speculative: bool = False
    is_processing: bool


class DefaultSettings(Struct, frozen=True, kw_only=True):
    """What a request gets that does not say otherwise."""

    n_ctx: int
    params: GenerationSettings


class Modalities(Struct, frozen=True, kw_only=True):
    """What the model takes beside text."""

    vision: bool = False
    audio: bool = False


class Props(Struct, frozen=True, kw_only=True):
    """Reply of `/props`. model_path: the model's name, since paths of the machine are not told."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities = Modalities()
    build_info: str
    is_sleeping: bool = False


class LoraAdapter(Struct, frozen=True):
    """An adapter. There are none."""

    id: int
    path: str
    scale: float


async def llama_props(request: web.Request) -> web.Response:
    """The properties of the server and its model, in llama.cpp's shapes."""
    context = request.app[CONTEXT]
    name, template, special = (
        context.engine.model_names[0],
        context.tokenizer.chat_template,
        context.tokenizer.special_tokens,
    )
    return json_response(
        Props(
            default_generation_settings=DefaultSettings(
                n_ctx=context.engine.max_model_len, params=generation_settings(context.defaults)
            ),
            total_slots=context.num_slots,
            model_alias=name,
            model_path=name,
            chat_template=template.source if template is not None else "",
            bos_token=str(special.get("bos_token") or ""),
            eos_token=str(special.get("eos_token") or ""),
            build_info=f"eventlm-{__version__}",
        )
    )


async def llama_slots(request: web.Request) -> web.Response:
    """How many sequences run, as slots. With `fail_on_no_slot` a 503 if no more can."""
    context = request.app[CONTEXT]
    status = await context.engine.administer(ReadStatus())
    num_busy = sum(replica.num_running for replica in status.replicas)
    num_slots, n_ctx = context.num_slots, context.engine.max_model_len
    if num_busy >= num_slots and request.query.get(FAIL_ON_NO_SLOT):
        raise unavailable("No slot is available; try again.")
    return json_response([Slot(id=number, n_ctx=n_ctx, is_processing=number < num_busy) for number in range(num_slots)])


async def lora_adapters(request: web.Request) -> web.Response:
    """The LoRA adapters, of which this server has none."""
    adapters: list[LoraAdapter] = []
    return json_response(adapters)
