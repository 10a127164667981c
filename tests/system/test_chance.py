"""The host's chance."""

from __future__ import annotations

from eventlm.system.chance import SystemChance


def test_it_never_gives_the_same_twice() -> None:
    chance = SystemChance()
    drawn = {chance.token_bytes(16) for _ in range(100)}
    assert {len(each) for each in drawn} == {16}
    assert len(drawn) == 100
