"""What is drawn from a seed about API keys: who holds one, with which class and limits, and what clients send."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from eventlm.config import Config
from eventlm.config.structs import ServiceClass
from tests.world.machine.draws import Draws

KEYS = Path("/etc/keys.toml")
_CLASSES = {"fast": ServiceClass(priority=-5, slo_ttft_ms=500), "slow": ServiceClass(priority=5)}
_NAMES = ("alice", "bob", "carol")


class Holder(NamedTuple):
    """The holder of a key. limits: as in the key file; empty: none."""

    name: str
    key: str
    service_class: str
    limits: dict[str, int]

    @property
    def sent(self) -> SentKey:
        """The holder's own key, as a client sends it."""
        return SentKey(self.key, self)


class SentKey(NamedTuple):
    """The key that a client sends. holder: None: the key is wrong or missing."""

    key: str
    holder: Holder | None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that carry the key."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


class KeysPlan(NamedTuple):
    """The keys of a plan. operator: may do everything, without limits."""

    holders: list[Holder]
    operator: Holder

    @property
    def content(self) -> bytes:
        """The content of the key file."""
        tables = [_table(each, ["inference"]) for each in self.holders]
        tables.append(_table(self.operator, ["inference", "admin"]))
        return "\n".join(tables).encode()

    def put_into(self, config: Config) -> Config:
        """A copy of the flags with these keys."""
        return structs.replace(
            config, server=structs.replace(config.server, api_keys_file=str(KEYS)), classes=dict(_CLASSES)
        )

    def sent(self, draws: Draws, number: int) -> SentKey:
        """The key that the client of a visit sends. One client in ten sends a wrong key or none."""
        kind = draws.between(0, 19, "sent key", number)
        if kind == 0:
            return SentKey("", None)
        if kind == 1:
            return SentKey(_key(draws, "wrong key", number), None)
        return self.holders[draws.between(0, len(self.holders) - 1, "holder", number)].sent


def draw_keys(draws: Draws) -> KeysPlan | None:
    """Draw the keys of a seed. One seed in three has keys."""
    if draws.draw("keys") % 3:
        return None
    holders = [_draw_holder(draws, number) for number in range(draws.between(1, len(_NAMES), "holders"))]
    return KeysPlan(holders, Holder("operator", _key(draws, "operator"), "", {}))


def _draw_holder(draws: Draws, number: int) -> Holder:
    most = {"requests_per_minute": 20, "tokens_per_minute": 4000, "concurrent_requests": 4}
    limits = {
        name: draws.between(1, limit, name, number)
        for name, limit in most.items()
        if draws.draw(f"has {name}", number) % 3 == 0
    }
    service_class = ["", *_CLASSES][draws.between(0, len(_CLASSES), "class of key", number)]
    return Holder(_NAMES[number], _key(draws, "key", number), service_class, limits)


def _key(draws: Draws, *what: Any) -> str:
    return f"sk-{draws.draw(*what):016x}"


def _table(holder: Holder, scopes: list[str]) -> str:
    limits = ", ".join(f"{name} = {limit}" for name, limit in holder.limits.items())
    lines = [
        "[[keys]]",
        f'name = "{holder.name}"',
        f'key = "{holder.key}"',
        f"scopes = {scopes}",
        f'service_class = "{holder.service_class}"',
        f"limits = {{ {limits} }}",
    ]
    return "\n".join(lines) + "\n"
