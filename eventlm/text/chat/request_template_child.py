"""The process that renders one chat template of a request: it reads a `TemplateTask` and writes a `RenderedTemplate`.

Its memory and its processor's time are limited before it reads anything.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.errors import CheckpointError
from eventlm.text.chat_template import ChatTemplate, ChatTemplateError

#: Rendering a long conversation takes some ten milliseconds.
MAX_SECONDS = 2
MAX_MEMORY_BYTES = 512 * 1024 * 1024
#: Far more than any context has.
MAX_TEXT_CHARACTERS = 16 * 1024 * 1024


class TemplateTask(Struct, frozen=True):
    """What the child is to render: `ChatTemplate(source, special_tokens).render(**arguments)`."""

    source: str
    special_tokens: dict[str, Any]
    arguments: dict[str, Any]


class RenderedTemplate(Struct, frozen=True, omit_defaults=True):
    """What it gave. fault: of the template itself. refusal: the template's own, of these messages."""

    text: str = ""
    fault: str = ""
    refusal: str = ""


def rendered(task: TemplateTask) -> RenderedTemplate:
    """The text of a task, or what is wrong."""
    try:
        text = ChatTemplate(task.source, task.special_tokens).render(**task.arguments)
    except CheckpointError as error:
        return RenderedTemplate(fault=str(error))
    except ChatTemplateError as error:
        return RenderedTemplate(refusal=str(error))
    except MemoryError:
        return RenderedTemplate(fault="it takes too much memory")
    if len(text) > MAX_TEXT_CHARACTERS:
        return RenderedTemplate(
            fault=f"it writes {len(text)} characters, and at most {MAX_TEXT_CHARACTERS} are allowed"
        )
    return RenderedTemplate(text)


def main() -> None:
    """Render what stdin asks for, within the limits."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=TemplateTask)
    sys.stdout.buffer.write(msgspec.json.encode(rendered(task)))


if __name__ == "__main__":
    main()
