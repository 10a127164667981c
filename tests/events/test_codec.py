from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlm.config import CoreConfig
from eventlm.config.core import MAX_REPLICAS, most_blocks
from eventlm.events import DECISIONS, FACTS, MARKERS, Event, Header, ReplicasetRecord, Resumed, UserMark
from eventlm.events.codec import (
    SUFFIX_BYTES,
    SplitLine,
    chain,
    close_line,
    decode_body,
    encode_body,
    split_line,
)

CHARACTERS = st.characters(codec="utf-8")
TEXT = st.text(CHARACTERS, max_size=20)
LARGEST = 2**63 - 1
INTEGERS = st.integers(0, LARGEST)
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
RAW = JSON.map(lambda value: msgspec.Raw(msgspec.json.encode(value)))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        [meta] = hint.__metadata__
        return limited_values(hint.__origin__, meta)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is tuple:
        return st.tuples(*(values(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(TEXT, values(arguments[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    return {
        int: INTEGERS,
        str: TEXT,
        bool: st.booleans(),
        types.NoneType: st.none(),
        Any: JSON,
        msgspec.Raw: RAW,
        msgspec.UnsetType: st.just(msgspec.UNSET),
    }[hint]


def limited_values(hint: Any, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Values of an integer, a string or a list within its limits."""
    if hint is int:
        return st.integers(limits.ge or 0, min(limits.le or LARGEST, LARGEST))  # type: ignore[type-var]
    if hint is str and limits.pattern is not None:
        return st.from_regex(limits.pattern, alphabet=CHARACTERS)
    if hint is str:
        return st.text(CHARACTERS, min_size=limits.min_length or 0, max_size=20)
    least = limits.min_length or 0
    return st.lists(values(get_args(hint)[0]), min_size=least, max_size=limits.max_length or least + 4)


def structs(struct: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(struct, include_extras=True)
    fields = {name: values(hints[name]) for name in struct.__struct_fields__}
    if struct is CoreConfig:
        fields["num_blocks"] = st.integers(2, most_blocks(MAX_REPLICAS))
        of_some = ("state_slots", "num_stages", "micro_batches", "num_kv_groups", "kv_shard_tokens")
        fields |= dict.fromkeys(of_some, st.just(msgspec.UNSET))
        return st.builds(struct, **fields).flatmap(
            lambda core: st.sampled_from([core, with_states(core), with_ranks(core)])
        )
    if struct is Header:
        # One is enough, and as large as all the rest.
        others = st.lists(structs(ReplicasetRecord), min_size=1, max_size=1)
        fields["replicasets"] = st.one_of([st.just(msgspec.UNSET), others])
    return st.builds(struct, **fields)


def with_ranks(core: CoreConfig) -> CoreConfig:
    return msgspec.structs.replace(
        core,
        num_replicas=1,
        max_tokens_per_row=1,
        num_stages=3,
        micro_batches=4,
        num_kv_groups=2,
        kv_shard_tokens=2 * core.block_size,
    )


def with_states(core: CoreConfig) -> CoreConfig:
    return msgspec.structs.replace(
        core,
        max_num_seqs=min(core.max_num_seqs, 99),
        max_num_batched_tokens=max(core.max_num_batched_tokens, core.block_size),
        max_tokens_per_row=1,
        state_slots=100,
        state_interval=3 * core.block_size,
    )


EVENTS = st.sampled_from([*FACTS, *DECISIONS, *MARKERS]).flatmap(structs)


@settings(max_examples=400)
@given(EVENTS)
def test_an_event_comes_back_as_it_went(event: Event) -> None:
    body = encode_body(event)
    back = decode_body(body)
    assert back == event
    assert type(back) is type(event)
    assert encode_body(back) == body


@settings(max_examples=200)
@given(EVENTS, TEXT)
def test_a_line_is_one_json_object_that_ends_in_its_hash(event: Event, previous_h: str) -> None:
    body = encode_body(event)
    h = chain(previous_h, body)
    line = close_line(body, h)
    assert line.count(b"\n") == 1
    assert split_line(line[:-1]) == SplitLine(body, h)
    parsed = json.loads(line)
    assert next(iter(parsed)) == "t"
    assert list(parsed)[-1] == "h"
    assert parsed["h"] == h
    assert parsed.get("s", 0) == event.s


@pytest.mark.parametrize("event", [*FACTS, *DECISIONS, *MARKERS])
def test_every_line_begins_with_tag_and_seq(event: type[Event]) -> None:
    hints = get_type_hints(event)
    required = {
        field.name: {int: 1, str: "x"}.get(hints[field.name])
        for field in msgspec.structs.fields(event)
        if field.required
    }
    body = encode_body(event(**{**required, "s": 7, "ts": 8, "c": 5}))
    assert body.startswith(f'{{"t":"{event.__struct_config__.tag}","s":7,"ts":8,"c":5'.encode())
    assert not body.endswith(b"}") or body.endswith(b'"previous_h":""')


def test_a_line_as_it_is_written_down() -> None:
    body = encode_body(UserMark(s=3, ts=9_007_199_254_740_991, c=2, text='a "b"\n'))
    assert body == rb'{"t":"mark","s":3,"ts":9007199254740991,"c":2,"text":"a \"b\"\n"'
    h = xxhash.xxh3_64(b"0123456789abcdef" + body).hexdigest()
    assert chain("0123456789abcdef", body) == h
    assert close_line(body, h) == body + b',"h":"' + h.encode() + b'"}\n'
    assert len(h) == 16
    assert len(close_line(b"", h)) - 1 == SUFFIX_BYTES


def test_defaults_are_left_out() -> None:
    assert encode_body(Resumed(s=1)) == b'{"t":"resume","s":1'


def test_the_hash_depends_on_the_line_and_on_all_before_it() -> None:
    body, other = encode_body(Resumed(s=1)), encode_body(Resumed(s=2))
    found = [chain("", body), chain("", other), chain(chain("", body), other), chain(chain("", other), other)]
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"x" * 40, b'{"t":"a","h":"0123456789abcde"}', b'{"t":"a","H":"0123456789abcdef"}']
)
def test_what_does_not_end_as_a_line_is_not_split(line: bytes) -> None:
    assert split_line(line) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"s":1',
        b'{"t":"unheard_of","s":1',
        b'{"t":"resume","s":1,"more":2',
        b'{"t":"resume","s":"1"',
        b'{"t":"resume","s":1.5',
        b'{"t":"cancel","s":1',
        b'{"t":"finish","s":1,"request":1,"index":0,"reason":"bored","position":1',
    ],
)
def test_what_is_not_an_event_is_not_decoded(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_body(body)
