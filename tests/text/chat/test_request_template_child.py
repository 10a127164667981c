"""The process that renders a request's template: what it answers, and that nothing gets it beyond its limits."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest

from eventlm.text.chat.request_template_child import MAX_SECONDS, RenderedTemplate, TemplateTask, rendered
from tests.processes import PATIENCE_SECONDS

MESSAGES = [{"role": "user", "content": "hi"}]


def task(source: str, **arguments: object) -> TemplateTask:
    return TemplateTask(source, {"bos_token": "<s>"}, {"messages": MESSAGES, **arguments})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}!", RenderedTemplate("<s>hi!")),
        ("{{ raise_exception('no ' + messages[0].role) }}", "no user"),
        ("{{ messages.nothing.nothing }}", "'list object' has no attribute 'nothing'"),
        ("{% for", "it does not compile"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ 'x' * 17000000 }}", "at most 16777216 are allowed"),
    ],
)
def test_what_it_answers(source: str, expected: RenderedTemplate | str) -> None:
    found = rendered(task(source))
    if isinstance(expected, RenderedTemplate):
        assert found == expected
    else:
        assert expected in (found.fault or found.refusal)
        assert not found.text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ '{:>99999999999}'.format('x') }}",
    ],
)
def test_time_and_memory_are_bounded(source: str) -> None:
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "eventlm.text.chat.request_template_child"],
        input=msgspec.json.encode(task(source)),
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert time.monotonic() - begun < MAX_SECONDS + PATIENCE_SECONDS / 2
    # It says so, or a signal ended it.
    assert ended.returncode < 0 or msgspec.json.decode(ended.stdout, type=RenderedTemplate).fault
