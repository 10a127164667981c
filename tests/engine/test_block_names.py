"""Block names: equal for equal content behind equal content, and never given twice."""

from __future__ import annotations

import pytest

from eventlm.engine.block_names import HASH_BYTES, BlockNames

KEY = b"k" * 32


def make_names(*, capacity: int = 100, key: bytes = KEY) -> BlockNames:
    return BlockNames(key, block_size=4, capacity=capacity)


def test_only_full_blocks_have_names() -> None:
    names = make_names()
    root = names.root("m", "", "")
    for length in range(13):
        found = names.extend(root, range(length))
        assert len(found.integers) == length // 4
        assert (found.last_hash == root) == (length < 4)


def test_a_name_stands_for_the_block_and_all_before_it() -> None:
    names = make_names()
    root = names.root("m", "", "")
    first = names.extend(root, [1, 2, 3, 4, 5, 6, 7, 8]).integers
    assert names.extend(root, [1, 2, 3, 4, 5, 6, 7, 8, 9]).integers == first
    assert names.extend(root, [1, 2, 3, 4, 5, 6, 7, 9]).integers[0] == first[0]
    other = names.extend(root, [0, 2, 3, 4, 5, 6, 7, 8]).integers
    assert not set(other) & set(first)


def test_going_on_from_a_hash_gives_the_same_names() -> None:
    names = make_names()
    root = names.root("m", "", "")
    whole = names.extend(root, range(16))
    first = names.extend(root, range(8))
    rest = names.extend(first.last_hash, range(8, 16))
    assert first.integers + rest.integers == whole.integers
    assert rest.last_hash == whole.last_hash


@pytest.mark.parametrize("other", [("n", "", ""), ("m", "a", ""), ("m", "", "s")])
def test_model_adapter_and_salt_keep_names_apart(other: tuple[str, str, str]) -> None:
    names = make_names()
    assert names.root("m", "", "") != names.root(*other)
    one = names.extend(names.root("m", "", ""), range(4)).integers
    assert names.extend(names.root(*other), range(4)).integers != one
    # Parts cannot be moved from one place to the next.
    assert names.root("m", "a", "b") != names.root("m", "ab", "")


def test_the_hash_is_keyed() -> None:
    one, other = make_names(), make_names(key=b"x" * 32)
    assert one.root("m", "", "") != other.root("m", "", "")
    assert len(one.root("m", "", "")) == HASH_BYTES


def test_the_table_is_bounded_and_forgets_what_was_named_longest_ago() -> None:
    names = make_names(capacity=2)
    root = names.root("m", "", "")

    def name(token: int) -> int:
        return names.extend(root, [token] * 4).integers[0]

    assert [name(1), name(2), name(1), name(3)] == [1, 2, 1, 3]
    # 2 went out for 3; its second name is a fresh one.
    assert [name(1), name(2), name(3)] == [1, 4, 5]
    assert len(names._integers) == 2


def test_an_integer_is_never_given_twice() -> None:
    names = make_names(capacity=8)
    root = names.root("m", "", "")
    given: dict[int, int] = {}
    for turn in range(400):
        token = turn * 7 % 13
        integer = names.extend(root, [token] * 4).integers[0]
        assert given.setdefault(integer, token) == token
