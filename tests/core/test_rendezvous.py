"""Rendezvous hashing: who moves when a server goes, and how even the shares are."""

from __future__ import annotations

from collections import Counter

from eventlm.core.rendezvous import rendezvous

KEYS = range(1, 6001)


def home(key: int, servers: list[int], shares: dict[int, int] | None = None) -> int:
    return servers[rendezvous(key, servers, [(shares or {}).get(server, 1_000_000) for server in servers])]


def test_a_server_that_goes_moves_its_own_keys_only_and_to_all_others_alike() -> None:
    servers = [3, 4, 5, 9, 11]
    before = {key: home(key, servers) for key in KEYS}
    after = {key: home(key, [each for each in servers if each != 5]) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {before[key] for key in moved} == {5}
    assert len(moved) == Counter(before.values())[5]
    counts = Counter(after[key] for key in moved)
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_servers_with_other_weights_keep_that_too() -> None:
    shares = {0: 1_000_000, 1: 3_000_000, 2: 500_000, 3: 1_000_000_000, 4: 1}
    before = {key: home(key, [0, 1, 2, 3, 4], shares) for key in KEYS}
    after = {key: home(key, [0, 1, 2, 4], shares) for key in KEYS}
    assert all(before[key] in (3, after[key]) for key in KEYS)


def test_keys_are_shared_by_weight() -> None:
    counts = Counter(home(key, list(range(10))) for key in KEYS)
    assert all(abs(count - 600) < 90 for count in counts.values())
    assert len(counts) == 10
    counts = Counter(home(key, [0, 1, 2], {0: 1_000_000, 1: 9_000_000, 2: 2_000_000}) for key in KEYS)
    assert all(abs(counts[server] - share * 500) < 150 for server, share in ((0, 1), (1, 9), (2, 2)))


def test_the_answer_never_changes() -> None:
    # Recorded runs are verified with it.
    assert [home(key, [0, 1, 2, 3, 4]) for key in range(12)] == [3, 0, 4, 2, 1, 0, 0, 0, 0, 1, 3, 1]
    assert [home(key, [0, 1, 2], {1: 5_000_000}) for key in range(12)] == [1, 0, 2, 2, 1, 0, 0, 1, 0, 1, 1, 1]
