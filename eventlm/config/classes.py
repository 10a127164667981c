"""Service classes: what requests of a class get where they say nothing themselves. Sections [classes.NAME]."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

#: The class of requests that name none, if there is one of this name.
DEFAULT_CLASS = "default"
#: In OpenAI's `service_tier` it leaves the choice to the server.
AUTO_CLASS = "auto"
CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="lower goes first")]
_Milliseconds = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class ServiceClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class. Times in milliseconds, 0 for none: to the first token from the arrival (`deadline_ms`) and from the
    reception (`slo_ttft_ms`), and between tokens (`slo_tpot_ms`).
    """

    priority: Priority = 0
    deadline_ms: _Milliseconds = 0
    slo_ttft_ms: _Milliseconds = 0
    slo_tpot_ms: _Milliseconds = 0
    drop_if_late: bool = False
