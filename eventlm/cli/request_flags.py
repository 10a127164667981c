"""Flags that are fields of a completion request. They are checked as those of the HTTP API, whose names they have."""

from __future__ import annotations

import argparse
import re
from typing import Any

#: Most new tokens where --max-tokens is not given and the context has room for them.
DEFAULT_MAX_TOKENS = 256

#: Every field that a flag sets.
_FIELDS = (
    "max_tokens", "min_tokens", "n", "seed", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip
_INVALID_FIELD = re.compile(r"Invalid value for '(?P<field>\w+)[^']*': (?P<what>.*?)\.?")
_BOUND = re.compile(r"expected `\w+` (?P<sign>[<>]=) (?P<number>\S+)")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags in groups, by what they are for."""
    _add_lengths(parser.add_argument_group("length and number"))
    _add_sampling(parser.add_argument_group("sampling (how the next token is drawn)"))
    _add_penalties(parser.add_argument_group("steering (tokens more or less likely, or impossible)"))
    _add_ends(parser.add_argument_group("where a completion ends"))
    _add_output(parser.add_argument_group("what is shown"))


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields by name; null for what was not given."""
    fields = {name: getattr(arguments, name) for name in _FIELDS}
    fields["logit_bias"] = dict(arguments.logit_bias) or None
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        fields[name] = fields[name] or None
    return fields


def flag_error(message: str) -> str:
    """A message of the HTTP API on one of the fields, in the words of the flags."""
    match = _INVALID_FIELD.fullmatch(message)
    if match is None or match["field"] not in _FIELDS:
        return message
    flag = {"n": "-n", "bad_words": "--bad-word", "skip_special_tokens": "--show-special-tokens"}.get(
        match["field"], "--" + match["field"].replace("_", "-")
    )
    bound = _BOUND.fullmatch(match["what"])
    what = f"must be at {'most' if bound['sign'] == '<=' else 'least'} {bound['number']}" if bound else match["what"]
    return f"{flag}: {what.replace('max_tokens', '--max-tokens')}"


def _add_lengths(group: argparse._ActionsContainer) -> None:
    _number(group, "--max-tokens", int, f"most new tokens (default: {DEFAULT_MAX_TOKENS}, or what fits)")
    _number(group, "--min-tokens", int, "no end, stop token or stop string counts before so many (default: 0)")
    _number(group, "-n", int, "completions of each prompt, which share its computed blocks (default: 1)")
    _number(group, "--seed", int, "the same seed draws the same noise: sampling is repeatable")


def _add_sampling(group: argparse._ActionsContainer) -> None:
    _number(group, "--temperature", float, "0 always takes the most likely token, 2 is wild (default: the model's own)")
    _number(group, "--top-k", int, "only the N most likely tokens; 0 is all (default: the model's own)")
    _number(group, "--top-p", float, "only the most likely tokens that have X together (default: the model's own)")
    _number(group, "--min-p", float, "only tokens at least X times as likely as the first (default: the model's own)")


def _add_penalties(group: argparse._ActionsContainer) -> None:
    _number(
        group,
        "--repetition-penalty",
        float,
        "above 1 makes what the prompt or the output has less likely (default: the model's own)",
    )
    _number(group, "--presence-penalty", float, "-2 to 2, once for each token that the output has (default: 0)")
    _number(group, "--frequency-penalty", float, "-2 to 2, each time that the output has a token (default: 0)")
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=_bias,
        metavar="ID=X",
        help="add X, -100 to 100, to the logit of a token id: 100 forces it, -100 bans it; may be repeated",
    )
    group.add_argument(
        "--allowed-token-ids", type=_ids, default=[], metavar="ID,...", help="nothing but these token ids"
    )
    group.add_argument(
        "--bad-word",
        dest="bad_words",
        action="append",
        default=[],
        metavar="TEXT",
        help="never this text, at the start or after a space; may be repeated",
    )


def _add_ends(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--stop-token-ids", type=_ids, default=[], metavar="ID,...", help="end at these token ids")
    group.add_argument(
        "--include-stop-str-in-output", action="store_true", default=None, help="print the stop text or token too"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate --max-tokens tokens, past end-of-text tokens"
    )


def _add_output(group: argparse._ActionsContainer) -> None:
    _number(group, "--logprobs", int, "log-probability of each token, and the N most likely alternatives")
    _number(group, "--prompt-logprobs", int, "the same for the prompt's tokens")
    group.add_argument(
        "--show-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        default=None,
        help="print special tokens, such as <|im_end|>, by their names",
    )


def _number(group: argparse._ActionsContainer, flag: str, type_: type[int] | type[float], text: str) -> None:
    group.add_argument(flag, type=type_, metavar="N" if type_ is int else "X", help=text)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids with commas between them, got {text!r}") from None


def _bias(text: str) -> tuple[str, float]:
    token_id, equals, bias = text.partition("=")
    try:
        if equals:
            return token_id, float(bias)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected ID=X such as 5=-100, got {text!r}")
