"""Which replicaset answers the requests for a model, where that is not its own alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from eventlm.errors import UsageError
from eventlm.types import parts_per_million

_Percent = Annotated[float, Meta(ge=0, le=100)]
#: A name may have colons too.
_SPEC = re.compile(r"(.+?):([a-z_]+=.*)")


class ModelRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of one model. fallback, canary, shadow: names of other models of the server.

    `fallback` gets the requests (of `fallback_class` only, if that is named) while no replica of the model is up, and
    once its oldest waiting request has waited for `fallback_after_ms` (0: never for that). `canary` gets a share of
    them, and `shadow` a copy of a share, whose answers are thrown away.
    """

    fallback: str = ""
    fallback_class: str = ""
    fallback_after_ms: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    canary: str = ""
    canary_percent: _Percent = 0.0
    shadow: str = ""
    shadow_percent: _Percent = 0.0

    def __post_init__(self) -> None:
        if not self.fallback and (self.fallback_class or self.fallback_after_ms):
            raise ValueError("fallback_class and fallback_after_ms need a fallback, the name of a model")
        for name, share in (("canary", self.canary_percent), ("shadow", self.shadow_percent)):
            if bool(getattr(self, name)) != bool(share):
                raise ValueError(f"{name}, the name of a model, and {name}_percent, above 0, need each other")

    @property
    def canary_ppm(self) -> int:
        """The share of the canary, in millionths."""
        return parts_per_million(self.canary_percent) // 100

    @property
    def shadow_ppm(self) -> int:
        """The share of the shadow, in millionths."""
        return parts_per_million(self.shadow_percent) // 100

    @property
    def fallback_after_ns(self) -> int:
        """As `Submission.gives_way_ns` has it."""
        return self.fallback_after_ms * 1_000_000


def split_rules_spec(spec: str) -> tuple[str, str]:
    """The name and the keys of `NAME:KEY=VALUE,...`. Raises UsageError."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"--model-rules {spec}: write NAME:KEY=VALUE,..., such as llama:fallback=small")
    return match[1], match[2]


def check_model_rules(rules: Mapping[str, ModelRules], models: Sequence[str], classes: Sequence[str]) -> None:
    """Raise UsageError for names that this server has not. models: those that requests may use."""
    known = ", ".join(models)
    for name, own in rules.items():
        if name not in models:
            raise UsageError(f"[models.{name}]: this server has no model {name!r}; it has {known}")
        for key in ("fallback", "canary", "shadow"):
            target = getattr(own, key)
            if target == name:
                raise UsageError(f"[models.{name}]: {key} = {target!r} is the model itself; name another one")
            if target and target not in models:
                raise UsageError(f"[models.{name}]: {key} = {target!r}: this server has no such model; it has {known}")
        if own.fallback_class and own.fallback_class not in classes:
            raise UsageError(f"[models.{name}]: there is no service class {own.fallback_class!r}; configure it")
