"""`eventlm generate`: complete prompts without a server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from eventlm.cli.config_flags import add_config_flags, with_config
from eventlm.cli.engine_command import compose_and_warn, run_in_loop, run_until_signal
from eventlm.cli.parser import Parser
from eventlm.cli.request_flags import DEFAULT_MAX_TOKENS, add_request_flags, flag_error, request_fields
from eventlm.config import Config
from eventlm.errors import ExitCode, InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eventlm.bootstrap.composition import Composition
    from eventlm.engine.request import Request
    from eventlm.sampling_params import TokenLogprobs
    from eventlm.text.choice_output import ChoiceOutput
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
  eventlm generate --chat "What is the capital of Japan?"
  eventlm generate - < prompt.txt
  eventlm generate "Name a robot:" -n 3 --seed 7 --stop "." --bad-word Robo
  eventlm generate "The answer is" --logprobs 3 --max-tokens 4
  eventlm generate "One" "Two" --record runs && eventlm replay runs/latest"""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="send each prompt through the chat template")
    add_request_flags(parser)
    add_config_flags(parser, without=("server", "gateway"))
    parser.set_defaults(run=with_config(run))


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Print the completions in the order of the prompts."""
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
    composed = compose_and_warn(config)
    group = await _requests(composed, arguments, prompts)
    code = await run_until_signal(composed.engine, _complete(composed, group, prompts))
    if code == ExitCode.OK and composed.engine.run_folder is not None:
        print(f"eventlm: recorded to {composed.engine.run_folder}/trace.jsonl", file=sys.stderr)
    return code


async def _requests(composed: Composition, arguments: argparse.Namespace, prompts: list[str]) -> list[Request]:
    """The engine's requests for the prompts, under the rules of the HTTP API. Raises UsageError."""
    import msgspec

    from eventlm.text.decoding import decode_request
    from eventlm.text.protocol import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest
    from eventlm.text.request_builder import RequestBuilder

    engine, given = composed.engine, request_fields(arguments)
    if given.get("max_tokens") == 0:
        raise UsageError("--max-tokens: must be at least 1")
    builder = RequestBuilder(engine, composed.tokenizer, defaults=composed.defaults, vocab_size=composed.vocab_size)
    group = []
    try:
        for prompt in prompts:
            token_ids = _token_ids(composed, prompt, chat=arguments.chat)
            max_tokens = max(min(DEFAULT_MAX_TOKENS, engine.max_model_len - len(token_ids)), 1)
            fields = {"max_tokens": max_tokens} | given | {"model": engine.model_names[0], "prompt": token_ids}
            body = decode_request(msgspec.json.encode(fields), CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
            requests, _ = await builder.completions(body, 0, offline=True, ready_ns=0)
            group += requests
    except InputError as error:
        raise UsageError(flag_error(str(error), given)) from error
    finally:
        builder.close()
    return group


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
    """Print what the engine makes of the group."""
    from contextlib import aclosing

    from eventlm.text.generation import submit

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
        #: The prompt of each choice, its number among the prompt's choices, and its request.
        self._choices = [(index, sample, request) for index, request in enumerate(group) for sample in range(request.n)]
        self._prompts = prompts
        self._outputs: list[list[ChoiceOutput]] = [[] for _ in self._choices]
        self._finished = [False] * len(self._choices)
        self._current = -1
        self._next()

    def add(self, output: ChoiceOutput) -> None:
        """Add the next piece of a completion."""
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
        index, sample, request = self._choices[self._current]
        if len(self._choices) > 1:
            head = self._prompts[index].strip().partition("\n")[0]
            shown = head if len(head) <= 60 else head[:59] + "…"
            which = f" ({sample + 1} of {request.n})" if request.n > 1 else ""
            self._write(f"=== {index + 1}/{len(self._prompts)}{which}: {shown}\n")
        self._write("".join(output.text for output in self._outputs[self._current]))

    def _write_logprobs(self) -> None:
        """Print the log-probabilities of prompt and completion that were asked for, a line for each token."""
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
