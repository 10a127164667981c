"""Plug-ins give the same answers twice, in another process, and under another hash seed; and change nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec

from eventlm.core.plugin import RequestView, SequenceView, StepLoad
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.engine.plugins.registry import BUILT_IN, resolve
from tests.policies.views import replica, view

PREDICTOR = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)


def some_views() -> list[SequenceView]:
    rng = random.Random(5)
    return [
        view(
            request=s,
            arrival_ns=rng.randrange(2**50),
            deadline_ns=rng.choice([0, rng.randrange(1, 10**10)]),
            prefill_ns=rng.randrange(10**10),
            done_tokens=rng.randrange(1000),
            service_class=rng.choice(["", "gold"]),
        )
        for s in range(200)
    ]


def answers() -> dict[str, object]:
    """What every built-in plug-in says to the same questions."""
    found: dict[str, object] = {}
    views = some_views()
    for name in BUILT_IN["policy"]:
        policy = resolve("policy", {"type": name}).instance
        found[name] = [policy.keys(views, now_ns) for now_ns in (0, 10**9, 2**52)]
    for name in BUILT_IN["batcher"]:
        batcher = resolve("batcher", {"type": name}).instance
        found[name] = [batcher.chunk_tokens(StepLoad(), asked, 512, PREDICTOR) for asked in views]
    for name in BUILT_IN["router"]:
        router = resolve("router", {"type": name}).instance
        replicas = [replica(index, admitted_tokens=index * 7 % 5) for index in range(5)]
        found[name] = [router.route(RequestView(s, s, 1, 10, session=s // 2), replicas) for s in range(20)]
    return found


def test_the_same_questions_get_the_same_answers() -> None:
    assert answers() == answers()


def test_another_process_gives_the_same_answers() -> None:
    for hash_seed in ("1", "2"):
        script = "import json; from tests.policies.test_purity import answers; print(json.dumps(answers()))"
        output = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout
        assert json.loads(output) == answers()


def test_the_questions_are_left_as_they_were() -> None:
    views = some_views()
    before = [msgspec.to_builtins(asked) for asked in views]
    load = StepLoad()
    for name in BUILT_IN["policy"]:
        resolve("policy", {"type": name}).instance.keys(views, 10**9)
    for name in BUILT_IN["batcher"]:
        resolve("batcher", {"type": name}).instance.chunk_tokens(load, views[0], 512, PREDICTOR)
    assert [msgspec.to_builtins(asked) for asked in views] == before
    assert msgspec.to_builtins(load) == msgspec.to_builtins(StepLoad())


def test_every_answer_is_an_integer() -> None:
    for name in BUILT_IN["policy"]:
        keys = resolve("policy", {"type": name}).instance.keys(some_views(), 10**9)
        assert {type(key) for key in keys} == {int}
