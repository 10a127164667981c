"""`eventlm pull`: fetch a model into the cache."""

from __future__ import annotations

import argparse

from eventlm.cli.parser import Parser
from eventlm.errors import UsageError


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    from eventlm.models.fetch.default_model import DEFAULT_MODEL, KNOWN_MODELS

    parser.description = (
        "Fetch a model once into the cache and print the folder of its checkpoint, or its GGUF file if that was\n"
        "named by its quantization. Progress goes to stderr.\n"
        "What is there already is not fetched again. A repository of the Hugging Face hub goes to the hub's\n"
        "cache, under its rules (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE); a model known\n"
        "by name to EVENTLM_HOME, else the user's cache folder."
    )
    parser.epilog = """\
examples:
  eventlm pull                       fetch the default model
  ls "$(eventlm pull smollm2)"       look at its files
  EVENTLM_HOME=/data eventlm pull    keep it elsewhere
  rm -r "$(eventlm pull)"            before a pull, if a file is damaged
  eventlm pull Qwen/Qwen3-0.6B       a repository of the hub, without its code
  eventlm pull ORG/NAME:Q4_K_M       its GGUF file of that quantization
  eventlm pull smollm2:bf16          the default model in bfloat16"""
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"model to fetch: {', '.join(KNOWN_MODELS)}, a repository ORG/NAME, or a GGUF file of one, "
        f"ORG/NAME:QUANTIZATION (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--revision", default="", metavar="REVISION", help="branch, tag or commit of a repository (default: main)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the folder on stdout."""
    from eventlm.models.fetch.hub import is_repo_id, pull_repo
    from eventlm.models.fetch.pull import pull

    if is_repo_id(arguments.name):
        print(pull_repo(arguments.name, arguments.revision))
    elif arguments.revision:
        raise UsageError(f"--revision is for a repository ORG/NAME, not for {arguments.name!r}")
    else:
        print(pull(arguments.name))
    return 0
