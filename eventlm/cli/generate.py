"""`eventlm generate`: complete prompts without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

from eventlm.cli.config_flags import add_config_flags, config_from_arguments, print_config
from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.compose.composition import Composition
    from eventlm.control.request import EngineRequest
    from eventlm.server.protocol import CompletionRequest

#: Most new tokens where --max-tokens is not given and the context has room for them.
DEFAULT_MAX_TOKENS = 256
#: Arguments that are fields of a request of the HTTP API, and checked as such.
_REQUEST_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Complete prompts and print the completions. The text is completed as it stands; --chat sends it\n"
        "through the model's chat template as a user's message. The completion of a single prompt is\n"
        "printed as it comes. A prompt of - is read from standard input."
    )
    parser.usage = "eventlm generate PROMPT... [--chat] [--max-tokens N] [flags]"
    parser.epilog = """\
examples:
  eventlm generate "The capital of France is" --max-tokens 8 --temperature 0
  eventlm generate --chat "What is the capital of France?"
  eventlm generate - < prompt.txt
  eventlm generate "One" "Two" --record runs && eventlm replay runs/latest/trace.jsonl"""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; - reads standard input")
    group = parser.add_argument_group("sampling")
    group.add_argument("--chat", action="store_true", help="send each prompt through the chat template")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"most new tokens (default: {DEFAULT_MAX_TOKENS}, or what fits)"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's own)")
    group.add_argument("--top-p", type=float, metavar="X", help="nucleus sampling (default: the model's own)")
    group.add_argument("--top-k", type=int, metavar="N", help="0 is the whole vocabulary (default: the model's own)")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever the model says")
    add_config_flags(parser, without=("server",))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the completions in the order of the prompts."""
    config = config_from_arguments(arguments)
    if arguments.print_config:
        return print_config(config)
    prompts = _prompts(arguments.prompts)
    # Only now: `--help`, `--print-config` and mistakes need not wait for the engine to be loaded.
    import uvloop

    from eventlm.cli.logging_setup import configure_logging

    configure_logging(config.log, default_level="warning")
    return uvloop.run(_generate(config, arguments, prompts))


def _prompts(given: list[str]) -> list[str]:
    if not given:
        raise UsageError("no prompt given: eventlm generate PROMPT..., or - to read standard input")
    if given.count("-") > 1:
        raise UsageError("- is given twice, but standard input can be read only once")
    return [_standard_input() if prompt == "-" else prompt for prompt in given]


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not valid UTF-8: {error.reason} at byte {error.start}") from error


async def _generate(config: Config, arguments: argparse.Namespace, prompts: list[str]) -> int:
    from eventlm.cli.stop_signals import StopSignals
    from eventlm.compose.composition import compose

    composed = compose(config)
    for warning in composed.warnings:
        print(f"eventlm: warning: {warning}", file=sys.stderr)
    group = [_request(composed, arguments, prompt) for prompt in prompts]
    with StopSignals() as signals:
        try:
            work = asyncio.ensure_future(_complete(composed, group, prompts))
            stopped = asyncio.ensure_future(signals.stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for each in (work, stopped):
                each.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
        finally:
            await composed.engine.stop()
    if work.cancelled():
        return signals.exit_code
    work.result()
    if composed.engine.run_folder is not None:
        print(f"eventlm: recorded to {composed.engine.run_folder}/trace.jsonl", file=sys.stderr)
    return 0


def _request(composed: Composition, arguments: argparse.Namespace, prompt: str) -> EngineRequest:
    """What the engine gets for a prompt, under the rules of the HTTP API. Raises UsageError."""
    from msgspec import structs

    from eventlm.server.errors import ApiError
    from eventlm.server.validation import Limits, check_request, engine_request

    engine = composed.engine
    limits = Limits(engine.model_names, engine.max_model_len, composed.vocab_size)
    token_ids = _token_ids(composed, prompt, chat=arguments.chat)
    try:
        body = _body(engine.model_names[0], arguments, room=engine.max_model_len - len(token_ids))
        check_request(body, limits)
        request = engine_request(
            body,
            token_ids,
            defaults=composed.defaults,
            limits=limits,
            prompt_param="prompt",
            received_ns=0,
            ready_ns=0,
        )
    except ApiError as error:
        raise UsageError(str(error)) from error
    return structs.replace(request, offline=True)


def _body(model: str, arguments: argparse.Namespace, *, room: int) -> CompletionRequest:
    import msgspec

    from eventlm.server.protocol import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest, decode_request

    fields: dict[str, Any] = {name: getattr(arguments, name) for name in _REQUEST_FIELDS}
    if fields["max_tokens"] is None:
        fields["max_tokens"] = max(min(DEFAULT_MAX_TOKENS, room), 1)
    # The prompt is encoded already; what stands here only has to be there.
    body = msgspec.json.encode(fields | {"model": model, "prompt": ""})
    return decode_request(body, CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)


def _token_ids(composed: Composition, prompt: str, *, chat: bool) -> list[int]:
    from eventlm.server.chat_template import ChatTemplateError

    if not chat:
        return composed.tokenizer.encode(prompt, add_special_tokens=True)
    template = composed.tokenizer.chat_template
    if template is None:
        raise UsageError("this model has no chat template; leave --chat out, or choose a model that was made for chat")
    try:
        text = template.render([{"role": "user", "content": prompt}])
    except ChatTemplateError as error:
        raise UsageError(f"--chat: {error}") from error
    return composed.tokenizer.encode(text, add_special_tokens=False)


async def _complete(composed: Composition, group: list[EngineRequest], prompts: list[str]) -> None:
    """Start the engine and print what it makes of the group."""
    from contextlib import aclosing

    from eventlm.server.errors import from_finish_reason
    from eventlm.server.generation import submit

    await composed.engine.start()
    generation = await submit(composed.engine, composed.tokenizer, group)
    printer = _Printer(prompts)
    async with aclosing(generation.outputs()) as outputs:
        async for output in outputs:
            error = from_finish_reason(output.finished.reason) if output.finished else None
            if error is not None:
                raise error
            printer.add(output.choice, output.text, finished=output.finished is not None)


class _Printer:
    """Prints completions in the order of their prompts: the first unfinished one as it comes, later ones after it."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self._waiting: list[list[str]] = [[] for _ in prompts]
        self._finished = [False] * len(prompts)
        self._current = -1
        self._next()

    def add(self, choice: int, text: str, *, finished: bool) -> None:
        """Take text of a completion."""
        self._finished[choice] |= finished
        if choice != self._current:
            self._waiting[choice].append(text)
            return
        self._write(text)
        while self._current < len(self._prompts) and self._finished[self._current]:
            self._write("\n")
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current == len(self._prompts):
            return
        if len(self._prompts) > 1:
            head = self._prompts[self._current].strip().partition("\n")[0]
            shown = head if len(head) <= 60 else head[:59] + "…"
            self._write(f"=== {self._current + 1}/{len(self._prompts)}: {shown}\n")
        self._write("".join(self._waiting[self._current]))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
