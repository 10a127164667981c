"""What the engine refuses before it reaches a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect, structs

from eventlm.config import CacheConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import (
    ContextLengthError,
    QueueFullError,
    RequestFieldError,
    TokenIdError,
)
from eventlm.engine.request_check import SCHEDULING_LIMITS, check_group, check_request
from eventlm.errors import InputError, UsageError
from eventlm.events import Arrived, Cancelled, Event, Finished, WorkerUp
from eventlm.events.codec import decode_body, encode_body
from eventlm.frontend.protocol import call_error, error_from
from eventlm.metrics.store import MetricsStore
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from tests.engine.engines import fake_setup, generate, recorded, request, running, verified
from tests.engine.test_engine_core import Rig
from tests.made_requests import changed
from tests.workload import POLICIES


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": (1, 9)}, "stop_token_ids"),
        ({"allowed_token_ids": (9,)}, "allowed_token_ids"),
        ({"bad_words_token_ids": ((1, 2), (3, 9))}, "bad_words"),
        ({"logit_bias": {9: 1.0}}, "logit_bias"),
    ],
)
def test_ids_that_the_model_does_not_have(params: dict[str, Any], name: str) -> None:
    wrong = request()
    wrong = structs.replace(wrong, sampling=structs.replace(wrong.sampling, **params))
    with pytest.raises(TokenIdError, match=f"{name} has the token id 9, .*from 0 to 8"):
        check_request(wrong, max_model_len=64, vocab_size=9)
    check_request(wrong, max_model_len=64, vocab_size=10)
    check_request(wrong, max_model_len=64, vocab_size=0)


@pytest.mark.parametrize(("prompt", "wrong"), [([1, 9, 2], 9), ([1, -1, 9], -1)])
def test_a_prompt_of_ids_that_the_model_does_not_have(prompt: list[int], wrong: int) -> None:
    with pytest.raises(TokenIdError, match=f"the prompt has the token id {wrong},"):
        check_request(request(prompt=prompt), max_model_len=64, vocab_size=9)
    with pytest.raises(TokenIdError, match="from 0 to 2147483647"):
        check_request(request(prompt=[-1]), max_model_len=64, vocab_size=0)


@pytest.mark.parametrize("name", ["cache_salt", "adapter"])
def test_text_that_cannot_be_hashed(name: str) -> None:
    wrong = request(**{name: "a\ud800"})
    with pytest.raises(RequestFieldError, match="a lone surrogate at 1") as caught:
        check_request(wrong, max_model_len=64, vocab_size=9)
    assert caught.value.param == name


OUTSIDE: list[tuple[str, Any]] = [
    *(("priority", value) for value in (-(2**31) - 1, 2**31, 2**70, None)),
    *((name, value) for name in ("deadline_ns", "slo_ttft_ns", "slo_tpot_ns") for value in (-1, 10**15 + 1, 2**64)),
    *((name, value) for name in ("session", "parent") for value in (-1, 2**53, 2**64)),
    *((name, value) for name in ("received_ns", "ready_ns") for value in (-1, 2**62, 2**64)),
    *(("front_end", value) for value in (-1, 2**31)),
    *((name, "x" * 257) for name in ("model", "adapter", "service_class")),
    *((name, "a\udc00") for name in ("model", "service_class")),
    ("kind", "chat"),
    ("waits_for_grammar", True),
]
OUTSIDE_PARAMS: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 16_385, True, 1.0, None)),
    *(("seed", value) for value in (-(2**63) - 1, 2**64, 2**70, 1.5)),
    *(("max_tokens", value) for value in (-1, 0, 2**31, 2**64)),
    *((name, value) for name in ("top_k", "min_tokens") for value in (-2, 2**31, 2**64)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 2**31)),
    *(("temperature", value) for value in (-0.1, 2.1, float("nan"), float("inf"), None, True)),
    *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("repetition_penalty", value) for value in (0.0, 1001.0)),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1)),
    *(("logit_bias", {1: value}) for value in (-101.0, float("nan"))),
    ("pooling", "first"),
    ("grammar", "\ud800"),
    ("bad_words_token_ids", ((1,), ())),
]


@pytest.mark.parametrize(("field", "value"), OUTSIDE + OUTSIDE_PARAMS)
def test_a_field_outside_its_limits_is_named(field: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        check_changed(field, value)
    assert caught.value.param == field.removesuffix("_token_ids")
    assert str(error_from(call_error(1, caught.value))) == str(caught.value)


def check_changed(field: str, value: Any) -> None:
    """Check a request with one field changed, in its parameters if it is one of these."""
    asked = request(3)
    if field in SamplingParams.__struct_fields__:
        asked = structs.replace(asked, sampling=structs.replace(asked.sampling, **{field: value}))
    else:
        asked = changed(asked, **{field: value})
    check_request(asked, max_model_len=64, vocab_size=0)


def test_limits_themselves_are_allowed() -> None:
    for name, limits in SCHEDULING_LIMITS.items():
        for value in limits:
            check_request(changed(request(3), **{name: value}), max_model_len=64, vocab_size=9)


def test_every_number_of_a_request_has_limits() -> None:
    numbers = {name for name, hint in SchedulingParams.__annotations__.items() if str(hint) in ("int", "float")}
    assert numbers - SCHEDULING_LIMITS.keys() == set()
    # The seed's do not fit into 64 signed bits.
    assert {
        name for name, kind in numbers_of(SamplingParams) if None in (kind.gt if kind.ge is None else kind.ge, kind.le)
    } == {"seed"}


def numbers_of(struct: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a struct that are numbers or None, and their types."""
    for field in inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        for kind in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
            if isinstance(kind, inspect.IntType | inspect.FloatType):
                yield field.name, kind


EDGES = [sign * 2**power + off for sign in (1, -1) for power in (31, 53, 62, 63, 64, 70) for off in (-1, 0, 1)]
INTEGERS = st.one_of(st.integers(-3, 40), st.sampled_from(EDGES))
FLOATS = st.one_of(st.floats(), st.floats(0, 2))
TEXTS = st.one_of(st.just(""), st.text(max_size=4), st.just("a\ud800"), st.just("x" * 300))
IDS = st.lists(INTEGERS, max_size=4).map(tuple)
PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": FLOATS,
    "top_k": INTEGERS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "repetition_penalty": FLOATS,
    "presence_penalty": FLOATS,
    "frequency_penalty": FLOATS,
    "logit_bias": st.dictionaries(INTEGERS, FLOATS, max_size=2),
    "allowed_token_ids": st.none() | IDS,
    "bad_words_token_ids": st.lists(IDS, max_size=2).map(tuple),
    "n": INTEGERS,
    "seed": st.none() | INTEGERS,
    "min_tokens": INTEGERS,
    "max_tokens": INTEGERS,
    "eos_token_ids": IDS,
    "stop_token_ids": IDS,
    "logprobs": st.none() | INTEGERS,
    "prompt_logprobs": st.none() | INTEGERS,
}
#: By fields, whatever their types allow.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": TEXTS,
    "prompt_token_ids": st.lists(INTEGERS, max_size=40),
    "kind": st.sampled_from(["generate", "score", "pool"]),
    "skip_cache_read": st.booleans(),
    "cache_salt": TEXTS,
    "adapter": TEXTS,
    "priority": INTEGERS,
    "deadline_ns": INTEGERS,
    "slo_ttft_ns": INTEGERS,
    "slo_tpot_ns": INTEGERS,
    "service_class": TEXTS,
    "session": INTEGERS,
    "parent": INTEGERS,
    "drop_if_late": st.booleans(),
    "waits_for_grammar": st.booleans(),
    "has_text_ends": st.booleans(),
    "offline": st.booleans(),
    "received_ns": INTEGERS,
    "ready_ns": INTEGERS,
    "front_end": INTEGERS,
}


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Up to three fields and what they become; of more, one is nearly always refused."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


@settings(max_examples=200, deadline=None)
@given(some_of(FIELDS), some_of(PARAMS), st.sampled_from(POLICIES))
def test_whatever_is_asked_for_is_refused_or_served(
    changes: dict[str, Any], param_changes: dict[str, Any], policy: str
) -> None:
    """The engine core goes on, its events can be written and read, and every observer takes them."""
    asked = request(3)
    rig = Rig(setup=fake_setup(policy={"type": policy}, max_queue_len=64, max_num_seqs=32))
    try:
        asked = changed(asked, sampling=structs.replace(asked.sampling, **param_changes), **changes)
        check_group([asked], rig.setup.core, vocab_size=0)
    except (UsageError, ContextLengthError, QueueFullError):
        return
    assert asked.n < 200
    events: list[Event] = []
    store = MetricsStore()
    store.apply(rig.engine_core._header)
    for observer in (events.append, store.apply):
        rig.engine_core.bus.attach(observer)
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(asked)
    for now_ns in range(10, 1000, 10):
        rig.engine_core.drain(now_ns)
        if not rig.launches:
            break
        rig.answer(rig.result())
    for seq in list(rig.engine_core.core.state.requests):
        rig.engine_core.put_fact(Cancelled(request=seq))
    rig.engine_core.drain(2000)
    assert rig.broken == []
    assert not rig.engine_core.core.state.requests
    assert store.next_s == rig.engine_core.core.next_seq
    for event in events:
        assert decode_body(encode_body(event)) == event


async def test_the_engine_refuses_what_it_cannot_record_and_serves_on(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        for wrong in ({"seed": 2**64}, {"priority": 2**70}, {"deadline_ns": -1}, {"session": 2**64}):
            with pytest.raises(InputError):
                await engine.submit([request(3, **{"seed": 1, **wrong})])
        [reader] = await generate(engine, request(3, seed=2**64 - 1))
        assert reader.reasons == ["length"]
    verified(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_without_a_prefix_cache_nothing_is_hit(tmp_path: Path, prefix_cache: bool) -> None:
    setup = fake_setup(record=tmp_path)
    config = structs.replace(setup.config, cache=CacheConfig(prefix_cache=prefix_cache))
    engine = InferenceEngine(structs.replace(setup, config=config, vocab_size=1024), real_system())
    try:
        await engine.start()
        with pytest.raises(TokenIdError):
            await engine.submit([request(prompt=[1024])])
        for _ in range(2):
            await generate(engine, request(2, prompt=range(40)))
    finally:
        await engine.stop()
    events = recorded(engine)
    assert [event.scheduling.skip_cache_read for event in events if isinstance(event, Arrived)] == [
        not prefix_cache
    ] * 2
    cached = [event.cached_tokens for event in events if isinstance(event, Finished)]
    assert cached == ([0, 32] if prefix_cache else [0, 0])
