"""A process of a pool that answers with what it gets and its own id, or dies."""

from __future__ import annotations

import os
import sys
import threading

from msgspec import Struct

from eventlm.replay.pool.serve import serve


class Word(Struct):
    """A specification."""

    text: str


class Answer(Struct):
    """A result."""

    text: str = ""
    pid: int = 0
    error: str = ""


def answer(word: Word) -> Answer:
    """Dies of `die`, and never answers `wait`."""
    print("plug-ins may print", word.text)
    if word.text == "die":
        print("a last word", file=sys.stderr)
        os._exit(7)
    if word.text == "wait":
        threading.Event().wait()
    return Answer(text=word.text, pid=os.getpid())


if __name__ == "__main__":
    serve(answer, Word)
