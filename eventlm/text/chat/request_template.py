"""Chat templates that requests bring, each rendered in a process of its own.

A template is a program. Jinja's sandbox keeps it from files and from Python's insides, but it may take any memory
(`'x' * 10 ** 9`) and any time (nested loops). So it runs in a child with limits, see `request_template_child`, and only
where the server's operator allows such templates at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import structlog

from eventlm.engine.request import QueueFullError
from eventlm.errors import InputError
from eventlm.system.processes import Processes
from eventlm.text.chat.messages import check_rendered_roles, template_arguments
from eventlm.text.chat.request_template_child import RenderedTemplate, TemplateTask
from eventlm.text.chat_template import TemplateSource
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tools.formats import ToolFormat

CHILD_MODULE = "eventlm.text.chat.request_template_child"
MAX_RUNNING = 2
#: Beside those that run. Beyond it a request is refused.
MAX_WAITING = 64
#: Of the clock. The limit of the processor's time, in the child, is shorter.
TIMEOUT_SECONDS = 10.0
PARAM = "chat_template"

_log = structlog.get_logger("eventlm.text")


class RequestTemplates:
    """Renders the templates of requests, a few at a time; `processes` None: refuses them."""

    def __init__(self, processes: Processes | None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._processes = processes
        self._timeout_seconds = timeout_seconds
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._num_pending = 0

    async def render(
        self,
        body: ChatCompletionRequest,
        special_tokens: dict[str, Any],
        *,
        tools: list[dict[str, Any]] | None,
        tool_format: ToolFormat | None,
        param: str,
    ) -> str:
        """The prompt of a conversation by its own template; see `template_arguments`.

        Raises InputError, and QueueFullError if too many wait.
        """
        assert body.chat_template is not None
        if self._processes is None:
            raise InputError(
                PARAM,
                "'chat_template' is not accepted: a template is a program, and this server runs only the one in the "
                "model's folder; leave it out, or start the server with --trust-request-chat-template.",
            )
        source = TemplateSource(body.chat_template)
        arguments = template_arguments(body, source, tools=tools, tool_format=tool_format, param=param)
        if self._num_pending >= MAX_RUNNING + MAX_WAITING:
            raise QueueFullError("too many requests with a 'chat_template' of their own are waiting")
        self._num_pending += 1
        try:
            async with self._running:
                rendered = await self._ask(self._processes, TemplateTask(source.source, special_tokens, arguments))
        finally:
            self._num_pending -= 1
        # Its own template is the request's too, so a conversation that it refuses is no fault of the messages.
        if problem := rendered.fault or rendered.refusal:
            raise InputError(PARAM, f"Invalid value for '{PARAM}': {problem.removesuffix('.')}.")
        check_rendered_roles(body, rendered.text, param)
        return rendered.text

    async def _ask(self, processes: Processes, task: TemplateTask) -> RenderedTemplate:
        pipe = asyncio.subprocess.PIPE
        try:
            question = msgspec.json.encode(task)
        except RecursionError as error:
            raise InputError(PARAM, "The messages or the tools are nested too deeply.") from error
        process = await processes.spawn(CHILD_MODULE, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer, _ = await process.communicate(question)
            return msgspec.json.decode(answer, type=RenderedTemplate)
        except TimeoutError:
            return RenderedTemplate(fault="it takes too long")
        except msgspec.DecodeError:
            # The limits end the child by a signal.
            _log.info("a request's chat template was ended", exit_code=process.returncode)
            return RenderedTemplate(fault="it takes too long, or too much memory")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


#: Where no request may bring a template.
UNTRUSTED_TEMPLATES = RequestTemplates(None)
