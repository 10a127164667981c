"""Prompts and outputs appear only where somebody asked for them: never in a trace, a log line or the metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from eventlm.worker.fake.tokens import WORDS
from tests.world.invariants.checks import Checks

if TYPE_CHECKING:
    from tests.world.programs.client import Client

#: Part of every longer prompt, and of nothing else: a snapshot may have three equal numbers of a sequence in a row.
_PROMPT = "pppp"
#: Shorter texts may occur by chance.
_LEAST_BYTES = 24


def _forms(text: str) -> Iterator[bytes]:
    """A text as it is, as ASCII JSON, and as a list of tokens, each of which is one byte."""
    content = text.encode()
    yield content
    yield json.dumps(text)[1:-1].encode()
    yield ",".join(map(str, content)).encode()


#: Words of the fake model with letters that nothing else has, and prompts.
_MARKS = {form for word in WORDS if not word.isascii() for form in _forms(word.decode().rstrip())} | {*_forms(_PROMPT)}


class Privacy:
    """The texts of clients, which must stay private."""

    def __init__(self, clients: Iterable[Client], checks: Checks) -> None:
        self._checks = checks
        self._texts = set(_MARKS)
        for client in clients:
            answer = client.answer(client.visit.body, 0)[0].encode()
            if len(answer) >= _LEAST_BYTES:
                self._texts.add(answer[:_LEAST_BYTES])
            prompt = client.visit.body.get("prompt")
            if isinstance(prompt, list):
                self._texts.add(",".join(map(str, prompt[:4])).encode())

    def check(self, where: str, content: bytes) -> None:
        """Check that no such text is in this content."""
        content = content.replace(b", ", b",")
        found = [text for text in self._texts if text in content]
        self._checks.check(f"no text is in {where}", not found, f"{found}")
