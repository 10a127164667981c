"""`eventlm generate`: complete prompts without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from eventlm.cli.config_flags import add_config_flags, config_from_arguments, print_config
from eventlm.cli.engine_command import compose_and_warn, run_in_loop, start_engine
from eventlm.cli.parser import Parser
from eventlm.cli.request_flags import DEFAULT_MAX_TOKENS, add_request_flags, flag_error, request_fields
from eventlm.config import Config
from eventlm.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eventlm.bootstrap.composition import Composition
    from eventlm.engine.request import Request
    from eventlm.sampling_params import TokenLogprobs
    from eventlm.text.choice_output import ChoiceOutput
    from eventlm.text.protocol import CompletionRequest
    from eventlm.text.tokenizer import Tokenizer


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
  eventlm generate "Name a robot:" -n 3 --seed 7 --stop "." --bad-word Robo
  eventlm generate "The answer is" --logprobs 3 --max-tokens 4
  eventlm generate "One" "Two" --record runs && eventlm replay runs/latest"""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="send each prompt through the chat template")
    add_request_flags(parser)
    add_config_flags(parser, without=("server",))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the completions in the order of the prompts."""
    config = config_from_arguments(arguments)
    if arguments.print_config:
        return print_config(config)
    prompts = _prompts(arguments.prompts)
    return run_in_loop(config, _generate(config, arguments, prompts))


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
    from eventlm.cli.serve.stop_signals import StopSignals

    composed = compose_and_warn(config)
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


def _request(composed: Composition, arguments: argparse.Namespace, prompt: str) -> Request:
    """What the engine gets for a prompt, under the rules of the HTTP API. Raises UsageError."""

    from eventlm.text.prompt_encoder import bad_words_token_ids
    from eventlm.text.requests.validation import Limits, check_request, engine_request, sampling_params

    engine = composed.engine
    limits = Limits(engine.model_names, engine.max_model_len, composed.vocab_size)
    token_ids = _token_ids(composed, prompt, chat=arguments.chat)
    try:
        body = _body(engine.model_names[0], arguments, room=engine.max_model_len - len(token_ids))
        check_request(body, limits)
        request = engine_request(
            body,
            sampling_params(body, composed.defaults, composed.vocab_size),
            token_ids,
            limits=limits,
            bad_words=bad_words_token_ids(composed.tokenizer, body.bad_words or []),
            prompt_param="prompt",
            received_ns=0,
            ready_ns=0,
        )
    except InputError as error:
        raise UsageError(flag_error(str(error))) from error
    return request.with_scheduling(offline=True)


def _body(model: str, arguments: argparse.Namespace, *, room: int) -> CompletionRequest:
    import msgspec

    from eventlm.text.decoding import decode_request
    from eventlm.text.protocol import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest

    fields = request_fields(arguments)
    if fields["max_tokens"] == 0:
        raise UsageError("--max-tokens: must be at least 1")
    if fields["max_tokens"] is None:
        fields["max_tokens"] = max(min(DEFAULT_MAX_TOKENS, room), 1)
    # The prompt is encoded already; what stands here only has to be there. Names of fields are the flags' own.
    body = msgspec.json.encode(fields | {"model": model, "prompt": ""})
    return decode_request(body, CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)


def _token_ids(composed: Composition, prompt: str, *, chat: bool) -> list[int]:
    from eventlm.text.chat_template import ChatTemplateError

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


async def _complete(composed: Composition, group: list[Request], prompts: list[str]) -> None:
    """Start the engine and print what it makes of the group."""
    from contextlib import aclosing

    from eventlm.text.generation import submit

    await start_engine(composed.engine)
    generation = await submit(composed.engine, composed.tokenizer, group)
    printer = _Printer(prompts, composed.tokenizer, group)
    async with aclosing(generation.outputs()) as outputs:
        async for output in outputs:
            if (error := output.error) is not None:
                raise error
            printer.add(output)


class _Printer:
    """Prints completions in the order of their prompts: the first unfinished one as it comes, later ones after it."""

    def __init__(self, prompts: list[str], tokenizer: Tokenizer, group: list[Request]) -> None:
        self._tokenizer = tokenizer
        #: Of each choice its prompt, its number among the prompt's choices, and its request.
        self._choices = [(place, sample, request) for place, request in enumerate(group) for sample in range(request.n)]
        self._prompts = prompts
        self._outputs: list[list[ChoiceOutput]] = [[] for _ in self._choices]
        self._finished = [False] * len(self._choices)
        self._current = -1
        self._next()

    def add(self, output: ChoiceOutput) -> None:
        """Take what is new of a completion."""
        self._finished[output.choice] |= output.finished is not None
        self._outputs[output.choice].append(output)
        if output.choice != self._current:
            return
        self._write(output.text)
        while self._current < len(self._choices) and self._finished[self._current]:
            self._write("\n")
            self._write_logprobs()
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current == len(self._choices):
            return
        place, sample, request = self._choices[self._current]
        if len(self._choices) > 1:
            head = self._prompts[place].strip().partition("\n")[0]
            shown = head if len(head) <= 60 else head[:59] + "…"
            which = f" ({sample + 1} of {request.n})" if request.n > 1 else ""
            self._write(f"=== {place + 1}/{len(self._prompts)}{which}: {shown}\n")
        self._write("".join(output.text for output in self._outputs[self._current]))

    def _write_logprobs(self) -> None:
        """Of the prompt and of the completion, as far as they were asked for: a token a line."""
        from eventlm.text.choice_output import join_outputs

        request = self._choices[self._current][2]
        whole = join_outputs(self._outputs[self._current])
        for title, token_ids, logprobs in (
            ("prompt", request.prompt_token_ids[1:], whole.prompt_logprobs),
            ("completion", whole.token_ids, whole.logprobs),
        ):
            if logprobs is not None:
                self._write(f"--- log-probabilities of the {title}: token, rank, most likely ones\n")
                for line in logprob_lines(self._tokenizer, token_ids, logprobs):
                    self._write(line + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def logprob_lines(tokenizer: Tokenizer, token_ids: list[int], logprobs: TokenLogprobs) -> Iterator[str]:
    """A line for each token."""
    from eventlm.text.tokenizer import token_text

    def shown(token_id: int, logprob: float) -> str:
        return f"{logprob:8.3f} {token_text(tokenizer, token_id)!r}"

    rows = zip(token_ids, logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs, strict=True)
    for token_id, logprob, rank, top_ids, top_logprobs in rows:
        top = "".join(f"  {shown(*pair)}" for pair in zip(top_ids, top_logprobs, strict=True))
        yield f"{shown(token_id, logprob):<28} #{rank:<6}{top}".rstrip()
