"""`eventlm generate`: complete prompts without a server."""

from __future__ import annotations

import argparse

from eventlm.cli.config_flags import add_config_flags, config_from_arguments, print_config
from eventlm.cli.parser import Parser


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
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most new tokens (default: 256)")
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
    raise SystemExit("generate")
