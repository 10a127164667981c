"""The block pool under random use by model sequences, and the order in which it takes blocks back."""

from __future__ import annotations

import random
import weakref

import msgspec
import pytest

from eventlm.core.state.block_pool import ROOT, BlockPool, Node, PoolSnapshot


class User:
    """A sequence as the pool sees it: a table of blocks, the first of them in the tree along a path of names."""

    def __init__(self, names: list[int]) -> None:
        self.names = names
        self.table: list[int] = []
        self.num_tree_blocks = 0


def lookup(pool: BlockPool, names: list[int], max_blocks: int) -> list[int]:
    """Blocks of the longest path in the tree that spells the first of `names`, walked from the root."""
    blocks: list[int] = []
    for parent, name in zip([ROOT, *names], names[:max_blocks], strict=False):
        node = pool.tree.get(name)
        if node is None or node[1] != parent:
            break
        blocks.append(node[0])
    return blocks


def hits(pool: BlockPool, names: list[int], max_blocks: int) -> list[int]:
    """The same as the pool finds them."""
    path: list[Node] = []
    pool.follow(names, min(max_blocks, len(names)), path)
    return [block for block, _ in path]


def admit(pool: BlockPool, names: list[int], num_blocks: int) -> User | None:
    """Hold what can be hit, allocate the rest; None if that is too much."""
    user = User(names)
    found = lookup(pool, names, len(names))
    if num_blocks - len(found) > pool.num_available - sum(pool.references[block] == 0 for block in found):
        return None
    pool.hold(found)
    user.table = found + pool.allocate(num_blocks - len(found))
    user.num_tree_blocks = len(found)
    return user


def publish(pool: BlockPool, user: User) -> None:
    """Enter up to two more of its blocks into the tree, as far as the tree has not got their content."""
    index = user.num_tree_blocks
    names = user.names[index : index + 2]
    missing = [name not in pool.tree for name in names]
    parent = user.names[index - 1] if index else ROOT
    num_blocks = pool.insert(names, parent, user.table[index : index + 2][: len(names)])
    assert num_blocks == [*missing, False].index(False)
    user.num_tree_blocks += num_blocks


def path(rng: random.Random) -> list[int]:
    """Names along a path of a small tree of texts; a name is its path, as with chained hashes."""
    names, name = [], 0
    for _ in range(rng.randint(1, 5)):
        name = name * 3 + rng.randint(1, 3)
        names.append(name)
    return names


@pytest.mark.parametrize("seed", range(30))
def test_random_use_keeps_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.choice([4, 9, 40]))
    users: list[User] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.35:
            names = path(rng)
            user = admit(pool, names, len(names) + rng.randint(0, 2))
            if user is not None:
                users.append(user)
        elif action < 0.7 and users:
            publish(pool, rng.choice(users))
        elif action < 0.8 and users and pool.num_available:
            rng.choice(users).table += pool.allocate(1)
        elif action > 0.98:
            pool.flush()
        elif users:
            pool.release_all(users.pop(rng.randrange(len(users))).table)
        assert pool.problems([user.table for user in users]) == []
        held = {block for user in users for block in user.table}
        assert pool.num_available == pool.num_blocks - len(held)
    for user in users:
        pool.release_all(user.table)
    assert pool.num_available == pool.num_blocks


@pytest.mark.parametrize("seed", range(30))
def test_a_known_path_is_followed_to_where_a_lookup_ends(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.choice([4, 9, 20]))
    users: list[User] = []
    watched = [path(rng) for _ in range(12)]
    # A name whose parent's was lost comes back under another one.
    watched += [[names[0] + 1000, *names[1:]] for names in watched]
    known: list[list[Node]] = [[] for _ in watched]
    lengths = set()
    for _ in range(400):
        action = rng.random()
        if action < 0.3:
            names = rng.choice(watched)
            user = admit(pool, names, len(names))
            users += [user] if user is not None else []
        elif action < 0.7 and users:
            publish(pool, rng.choice(users))
        elif 0.98 < action < 0.99:
            pool.flush()
        elif action < 0.99 and users:
            pool.release_all(users.pop(rng.randrange(len(users))).table)
        elif action >= 0.99:
            pool.reset()
            users.clear()
        for index in rng.sample(range(len(watched)), 6):
            names = watched[index]
            pool.follow(names, len(names), known[index])
            blocks = [block for block, _ in known[index]]
            assert blocks == lookup(pool, names, len(names))
            assert [block for block, _ in pool.idle_on(known[index])] == [b for b in blocks if not pool.references[b]]
            lengths.add(len(blocks))
    assert len(lengths) > 2


def fill(pool: BlockPool, names: list[int]) -> User:
    user = admit(pool, names, len(names))
    assert user is not None
    for _ in names:
        publish(pool, user)
    return user


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = BlockPool(6)
    first, second = fill(pool, [1, 11, 111]), fill(pool, [2, 22, 222])
    pool.release_all(first.table)
    pool.release_all(second.table)
    # Using the first again makes the second the older one.
    again = fill(pool, [1, 11, 111])
    assert again.table == first.table
    pool.release_all(again.table)
    gone = []
    for _ in range(6):
        before = set(pool.tree)
        pool.allocate(1)
        gone += before - set(pool.tree)
    assert gone == [222, 22, 2, 111, 11, 1]


def test_a_parent_that_is_used_more_recently_than_its_child_outlives_it() -> None:
    pool = BlockPool(4)
    long = fill(pool, [1, 11, 111])
    pool.release_all(long.table)
    pool.release_all(fill(pool, [1]).table)
    for _ in range(3):
        pool.allocate(1)
    # One block was free; then the two deeper ones went.
    assert list(pool.tree) == [1]


def test_free_blocks_are_taken_before_those_that_can_be_hit() -> None:
    pool = BlockPool(3)
    user = fill(pool, [1])
    pool.release_all(user.table)
    taken = pool.allocate(2)
    assert user.table[0] not in taken
    assert hits(pool, [1], 1) == user.table


def test_hits_end_at_the_first_gap_and_at_the_limit() -> None:
    pool = BlockPool(8)
    user = fill(pool, [1, 11, 111])
    assert hits(pool, [1, 11, 111, 1111], 9) == user.table
    assert hits(pool, [1, 11, 111], 2) == user.table[:2]
    assert hits(pool, [1, 12, 111], 9) == user.table[:1]
    assert hits(pool, [11], 9) == []


def test_a_name_under_another_parent_is_no_hit() -> None:
    # The bounded table of names had lost the parent's, and gave it a new one.
    pool = BlockPool(8)
    user = fill(pool, [1, 11])
    assert hits(pool, [2, 11], 9) == []
    fill(pool, [2])
    assert hits(pool, [2, 11], 9) == hits(pool, [2], 9)
    assert hits(pool, [1, 11], 9) == user.table


def test_a_block_held_twice_is_there_until_both_have_left() -> None:
    pool = BlockPool(2)
    first = fill(pool, [1])
    second = admit(pool, [1], 2)
    assert second is not None
    assert second.table[0] == first.table[0]
    pool.release_all(first.table)
    assert pool.num_available == 0
    pool.release_all(second.table)
    assert pool.num_available == 2
    assert hits(pool, [1], 1) == first.table


def test_forgetting_everything_leaves_nothing_to_hit() -> None:
    pool = BlockPool(4)
    fill(pool, [1, 11])
    pool.reset()
    assert hits(pool, [1], 1) == []
    assert pool.num_available == 4
    assert pool.problems([]) == []


def test_a_flush_takes_blocks_that_no_sequence_holds() -> None:
    pool = BlockPool(6)
    idle, held = fill(pool, [1, 2]), fill(pool, [1, 3, 4])
    pool.release_all(idle.table)
    kept = held.table[:]
    before = pool.digest
    assert pool.flush() == 1
    assert pool.digest != before
    assert pool.problems([kept]) == []
    assert (hits(pool, [1, 2], 2), hits(pool, [1, 3, 4], 3)) == (kept[:1], kept)
    pool.release_all(kept)
    assert pool.num_available == 6
    assert pool.flush() == 3
    assert (pool.flush(), pool.tree, pool.problems([])) == (0, {}, [])
    assert len(pool.allocate(6)) == 6


def test_problems_are_seen() -> None:
    pool = BlockPool(4)
    user = fill(pool, [1, 11])
    assert any("references, and is in 0 tables" in problem for problem in pool.problems([]))
    assert any("tables hold blocks [9]" in problem for problem in pool.problems([user.table, [9]]))
    assert pool.problems([user.table]) == []
    pool._free[0].append(pool._free[0][0])
    assert any("each once" in problem for problem in pool.problems([user.table]))
    pool._free[0].pop()
    del pool.tree[1]
    assert any("lost its parent" in problem for problem in pool.problems([user.table]))


def test_the_digest_tells_histories_apart_and_repeats() -> None:
    def run(names: list[list[int]]) -> str:
        pool = BlockPool(8)
        users = [fill(pool, path) for path in names]
        for user in users:
            pool.release_all(user.table)
        return str(pool.digest)

    assert run([[1, 11], [2]]) == run([[1, 11], [2]])
    assert len({run([[1, 11], [2]]), run([[2], [1, 11]]), run([[1, 11], [3]]), run([[1], [2]])}) == 4


def test_the_digest_takes_any_names_and_may_be_read_at_any_time() -> None:
    read, unread = BlockPool(16), BlockPool(16)
    for pool in (read, unread):
        for names in ([-1, 1 << 70], [5, (1 << 64) - 1], [7]):
            pool.release_all(fill(pool, names).table)
            if pool is read:
                assert pool.digest == pool.digest
    assert read.digest == unread.digest != BlockPool(16).digest


def test_a_restored_pool_has_the_digest_of_its_past() -> None:
    pool = BlockPool(4)
    before = pool.digest
    pool.allocate(1)
    assert pool.digest != before
    again = BlockPool(4)
    taken = msgspec.json.decode(msgspec.json.encode(pool.snapshot()), type=PoolSnapshot)
    again.restore(taken, [[block for block in range(4) if pool.references[block]]])
    assert again.digest == pool.digest
    assert again.allocate(2) == pool.allocate(2)
    assert again.digest == pool.digest


def allocate_in_turns(pool: BlockPool, first: int, last: int) -> list[int] | None:
    """Blocks for these indices of a table, two in each group before the next; None if a group lacks them."""
    groups = [index // 2 % pool.num_groups for index in range(first, last)]
    if any(groups.count(group) > pool.available_in(group) for group in groups):
        return None
    return [block for group in groups for block in pool.allocate(1, group)]


@pytest.mark.parametrize("seed", range(30))
def test_groups_under_random_use_keep_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.choice([3, 5, 12]), num_groups=rng.choice([2, 3]))
    users: list[User] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.45:
            user = User(path(rng))
            found = lookup(pool, user.names, len(user.names))
            pool.hold(found)
            fresh = allocate_in_turns(pool, len(found), len(user.names) + 1)
            if fresh is None:
                pool.release(found[::-1])
            else:
                user.table, user.num_tree_blocks = found + fresh, len(found)
                users.append(user)
        elif action < 0.7 and users:
            publish(pool, rng.choice(users))
        elif action < 0.97 and users:
            pool.release_all(users.pop(rng.randrange(len(users))).table)
        elif action >= 0.97:
            pool.flush()
        tables = [user.table for user in users]
        assert pool.problems(tables) == []
        assert sum(map(pool.available_in, range(pool.num_groups))) == pool.num_available
        if rng.random() < 0.1:
            taken = msgspec.json.decode(msgspec.json.encode(pool.snapshot()), type=PoolSnapshot)
            restored = BlockPool(pool.blocks_per_group, num_groups=pool.num_groups)
            restored.restore(taken, tables)
            assert restored.problems(tables) == []
            pool = restored


def test_a_block_that_is_taken_back_takes_what_hangs_on_it_out_of_the_tree() -> None:
    pool = BlockPool(2, num_groups=2)
    root, child = pool.allocate(1, 0) + pool.allocate(1, 1)
    assert (pool.group_of(root), pool.group_of(child)) == (0, 1)
    pool.insert([5, 6], ROOT, [root, child])
    pool.release_all([root, child])
    assert pool.num_idle == 2
    # The first group has one free block, then it must take the root back; its child lies in the other group.
    assert root in pool.allocate(2, 0)
    assert pool.tree == {}
    assert (pool.num_idle, pool.available_in(1)) == (0, 2)
    assert sorted(pool.allocate(2, 1)) == [2, 3]


def test_pools_of_one_size_share_their_numbers_as_long_as_there_is_one() -> None:
    size = 70_001
    first, second = BlockPool(size), BlockPool(size)
    numbers = weakref.ref(first._numbers)
    assert second._numbers is numbers()
    del first
    assert numbers() is not None
    del second
    assert numbers() is None
