"""The scheduling fields of a request, from its body and its service class.

A class has defaults for the priority, the deadline, the objectives and `drop_if_late`. The class of a request is that
of its key, else the one named by the header `x-eventlm-class` or OpenAI's `service_tier`, else `default` if configured.

If any key has a class, requests may not choose one, nor a more urgent priority than that of their class. Otherwise they
may. `requests_choose_class` overrides this with `always` or `never`.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from eventlm.config.options import nearest
from eventlm.config.structs import AUTO_CLASS, DEFAULT_CLASS, ServiceClass
from eventlm.errors import InputError
from eventlm.server.auth.api_keys import Principal
from eventlm.server.context import ServerContext
from eventlm.server.errors import ApiError
from eventlm.text.protocol import LatencyObjective, RequestFields
from eventlm.types import NANOSECONDS_PER_MILLISECOND

CLASS_HEADER = "x-eventlm-class"
SESSION_HEADER = "x-session-id"
#: OpenAI's own tiers. They have no effect unless a class has that name.
TIERS = (AUTO_CLASS, DEFAULT_CLASS, "flex", "scale", "priority")


def scheduling_fields(
    context: ServerContext, principal: Principal, class_header: str, session_header: str, body: RequestFields
) -> dict[str, Any]:
    """The fields of `SchedulingParams` from the body, the headers `x-eventlm-class` and `x-session-id`, and the key.
    Raises ApiError.

    Sets `service_tier` of the body to the tier in use, if a tier was asked for or the request has a class.
    """
    name = _apply_class(context, principal, class_header, body)
    slo = body.slo or LatencyObjective()
    return {
        "service_class": name,
        "priority": body.priority or 0,
        "deadline_ns": (body.deadline_ms or 0) * NANOSECONDS_PER_MILLISECOND,
        "slo_ttft_ns": (slo.ttft_ms or 0) * NANOSECONDS_PER_MILLISECOND,
        "slo_tpot_ns": (slo.tpot_ms or 0) * NANOSECONDS_PER_MILLISECOND,
        "drop_if_late": body.drop_if_late or False,
        "session": session_of(context, principal, session_header, body),
    }


def session_of(context: ServerContext, principal: Principal, session_header: str, body: RequestFields) -> int:
    """The number of an owner's session. The trace has it, and it says nothing of the name; 0: no session."""
    name = session_header or body.session_id or body.prompt_cache_key
    if not name:
        return 0
    text = f"{principal.owner}\0{name}".encode(errors="surrogateescape")
    # 53 bits, which readers of JSON with 64-bit floats hold exactly.
    return int.from_bytes(blake2b(text, digest_size=8, key=context.session_key).digest()) >> 11 or 1


def _apply_class(context: ServerContext, principal: Principal, class_header: str, body: RequestFields) -> str:
    """Find the request's class and apply its defaults. Returns its name, empty for none."""
    classes = context.classes
    choice = context.config.requests_choose_class
    may_choose = choice == "always" or (choice == "auto" and not context.keys.service_classes)
    name = _name(class_header, body.service_tier or "", principal, classes, may_choose)
    found = classes.get(name, ServiceClass())
    if not may_choose and body.priority is not None and body.priority < found.priority:
        raise _forbidden(
            "priority", f"These requests have the priority {found.priority} at best, and lower goes first."
        )
    _fill_in(body, found)
    if body.drop_if_late and body.deadline_ms is None and (body.slo is None or body.slo.ttft_ms is None):
        raise InputError("drop_if_late", "'drop_if_late' needs a 'deadline_ms' or 'slo.ttft_ms' to be late for.")
    if name or body.service_tier is not None:
        body.service_tier = name or DEFAULT_CLASS
    return name


def check_key_classes(context: ServerContext) -> list[str]:
    """Warnings for classes of keys that are not configured."""
    return [
        f"a key has the service class {name!r}, which is not configured"
        + (f" (did you mean {guess}?)" if (guess := nearest(name, context.classes)) else "")
        + ": its requests have none"
        for name in context.keys.service_classes
        if name not in context.classes
    ]


def _name(header: str, tier: str, principal: Principal, classes: Mapping[str, ServiceClass], may_choose: bool) -> str:
    own = principal.service_class if principal.service_class in classes else ""
    default = own or (DEFAULT_CLASS if DEFAULT_CLASS in classes else "")
    _check_known(CLASS_HEADER, header, classes, ())
    _check_known("service_tier", tier, classes, TIERS)
    if header and header != default and not may_choose:
        raise _forbidden(CLASS_HEADER, f"Requests may not choose the class '{header}' here.")
    if not may_choose:
        return default
    # OpenAI's tier is a wish, whose outcome is in the reply; the header is binding.
    return header or (tier if tier in classes else "") or default


def _check_known(param: str, name: str, classes: Mapping[str, ServiceClass], others: tuple[str, ...]) -> None:
    if name and name not in classes and name not in others:
        known = ", ".join(f"'{each}'" for each in dict.fromkeys((*classes, *others)))
        raise InputError(
            param,
            f"Invalid value for '{param}': {f'known are {known}' if known else 'no service class is configured'}.",
        )


def _forbidden(param: str, message: str) -> ApiError:
    return ApiError(403, message, param=param, code="service_class_not_allowed")


def _fill_in(body: RequestFields, found: ServiceClass) -> None:
    if body.priority is None:
        body.priority = found.priority
    if body.deadline_ms is None and found.deadline_ms:
        body.deadline_ms = found.deadline_ms
    slo = body.slo or LatencyObjective()
    ttft_ms, tpot_ms = slo.ttft_ms or found.slo_ttft_ms, slo.tpot_ms or found.slo_tpot_ms
    if ttft_ms or tpot_ms:
        body.slo = LatencyObjective(ttft_ms=ttft_ms or None, tpot_ms=tpot_ms or None)
    if body.drop_if_late is None:
        body.drop_if_late = found.drop_if_late
