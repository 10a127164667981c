"""Submits requests to the model that is to answer them: the one asked for, its canary or fallback; and to its shadow.

The choice falls before the prompt is written, because each model has its own template and tokens. The arrival of the
request says in the trace who was chosen, so replays know.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Generic, NamedTuple

import structlog
from msgspec import structs

from eventlm.engine.request import ModelBusyError, Submission
from eventlm.errors import EventLMError
from eventlm.scheduling_params import LOWEST_PRIORITY
from eventlm.server.api import Api, BodyT, Caller, Exchange, decode_for
from eventlm.server.context import LATEST_TAG, ServerContext
from eventlm.server.scheduling import session_of
from eventlm.text.generation import Generation
from eventlm.types import ModelRoute

_log = structlog.get_logger("eventlm.server")

#: Of shadows.
_LAST = {"priority": LOWEST_PRIORITY, "deadline_ns": 0, "slo_ttft_ns": 0, "slo_tpot_ns": 0, "drop_if_late": False}


class AnsweredBody(NamedTuple, Generic[BodyT]):
    """What was submitted, and the context of the model that answers. answered_by: its name if it is not the one that
    was asked for.
    """

    context: ServerContext
    body: BodyT
    exchange: Exchange
    generation: Generation
    answered_by: str


class _Choice(NamedTuple):
    """gives_way: whether another one is tried where this one is busy."""

    model: str
    route: ModelRoute
    gives_way_ns: int


async def submit(
    context: ServerContext, api: Api[BodyT], body: BodyT, data: bytes, caller: Caller, received_ns: int
) -> AnsweredBody[BodyT]:
    """Submit a body that is `data`. The generation must be released. Raises InputError or ApiError."""
    asked = body.model or context.engine.model_names[0]
    asked = asked if asked in context.engine.model_names else asked.removesuffix(LATEST_TAG)
    rules = context.whole_config.models.get(asked)
    if rules is None:
        context = context.of_model(body.model)
        exchange = await Exchange.prepare(context, api, body, data, caller, received_ns)
        return AnsweredBody(context, body, exchange, await exchange.submit(context), "")
    shadow = rules.shadow if _is_drawn(context, caller, body, f"shadow of {asked}", rules.shadow_ppm) else ""
    for choice in _choices(context, asked, body, caller):
        own = context.of_model(choice.model)
        if own.forwards != context.of_model(asked).forwards:
            body = decode_for(own, api, data)
        exchange = await Exchange.prepare(own, api, body, data, caller, received_ns)
        gives_way_ns = choice.gives_way_ns
        if choice.route == "" and rules.fallback_class not in ("", exchange.group[0].scheduling.service_class):
            gives_way_ns = -1
        exchange = _routed(exchange, choice, asked)._replace(
            submission=structs.replace(exchange.submission, gives_way_ns=gives_way_ns)
        )
        try:
            generation = await exchange.submit(own)
        except ModelBusyError as error:
            _log.debug("model gives way", model=choice.model, reason=str(error))
            continue
        if shadow and api.has_shadows and context.has_room_for_shadow:
            context.run_shadow(_answer_in_shadow(context, api, shadow, asked, data, caller, received_ns))
        return AnsweredBody(own, body, exchange, generation, choice.model if choice.route else "")
    raise AssertionError("the last choice does not give way")


def _choices(context: ServerContext, asked: str, body: BodyT, caller: Caller) -> Iterator[_Choice]:
    """Those that may answer, in order. All but the last give way, and one asked for that has a fallback."""
    rules = context.whole_config.models[asked]
    if rules.canary and _is_drawn(context, caller, body, f"canary of {asked}", rules.canary_ppm):
        yield _Choice(rules.canary, "canary", 0)
    yield _Choice(asked, "", rules.fallback_after_ns if rules.fallback else -1)
    yield _Choice(rules.fallback, "fallback", -1)


def _is_drawn(context: ServerContext, caller: Caller, body: BodyT, what: str, share_ppm: int) -> bool:
    """Whether a request is in a share. All of a session are, or none."""
    session = session_of(context, caller.principal, caller.session_header, body)
    text = f"{what}\0{session or caller.request_id}"
    drawn = int.from_bytes(blake2b(text.encode(), digest_size=8, key=context.session_key).digest()) % 1_000_000
    return drawn < share_ppm


def _routed(exchange: Exchange, choice: _Choice, asked: str) -> Exchange:
    if not choice.route:
        return exchange
    return exchange._replace(
        group=[
            each.with_scheduling(model=choice.model, asked_model=asked, route=choice.route) for each in exchange.group
        ]
    )


async def _answer_in_shadow(
    context: ServerContext, api: Api[BodyT], model: str, asked: str, data: bytes, caller: Caller, received_ns: int
) -> None:
    """Have another model answer too if it is up, after everything else, and throw the answer away."""
    own = context.of_model(model)
    try:
        exchange = await Exchange.prepare(own, api, decode_for(own, api, data), data, caller, received_ns)
        exchange = _routed(exchange, _Choice(model, "shadow", -1), asked)
        group = [each.with_scheduling(**_LAST) for each in exchange.group]
        # It costs its owner nothing, and nobody can ask for it.
        submission = Submission(reply_id=f"shadow-{exchange.submission.reply_id}", gives_way_ns=0)
        generation = await exchange._replace(group=group, submission=submission).submit(own)
        try:
            while not generation.is_over:
                await generation.take()
        finally:
            own.release(generation)
    except EventLMError as error:
        _log.debug("a shadow was not answered", model=model, reason=str(error))
    except Exception:
        _log.exception("a shadow failed: this is a defect, please report it", model=model)
