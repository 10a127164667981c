"""Flags that are fields of a completion request. They are checked as those of the HTTP API, whose names they have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Container
from typing import Any

#: Most new tokens without --max-tokens, if the context has room for them.
DEFAULT_MAX_TOKENS = 256

#: Before a field's name in the parsed arguments, so that it does not clash with the command's own arguments.
_PREFIX = "request."
#: The fields whose flags are not `--` and the name.
_FLAGS = {"n": "-n", "bad_words": "--bad-word", "skip_special_tokens": "--show-special-tokens"}
_INVALID_FIELD = re.compile(r"Invalid value for '(?P<field>\w+)[^']*': (?P<what>.*?)\.?")
#: What such a message says of a number: after the field's name, and before what was given.
_BOUND = re.compile(r"\w+ (must be [a-z ]+ [-+.\w]+), got .*")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags in groups, by what they are for."""

    def add(field: str, text: str, **keywords: Any) -> None:
        keywords = {"dest": _PREFIX + field, "default": argparse.SUPPRESS, "help": text} | keywords
        group.add_argument(_flag(field), **keywords)

    integer: dict[str, Any] = {"type": int, "metavar": "N"}
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    ids: dict[str, Any] = {"type": _ids, "metavar": "ID,..."}
    texts: dict[str, Any] = {"action": "append", "metavar": "TEXT"}
    group = parser.add_argument_group("length and number")
    add("max_tokens", f"most new tokens (default: {DEFAULT_MAX_TOKENS}, or what fits)", **integer)
    add("min_tokens", "ignore ends and stops until so many tokens are generated (default: 0)", **integer)
    add("n", "completions of each prompt, which share its computed blocks (default: 1)", **integer)
    add("seed", "the same seed draws the same noise: sampling is repeatable", **integer)
    group = parser.add_argument_group("sampling (how the next token is drawn)")
    add("temperature", "0 always takes the most likely token, 2 is wild (default: the model's own)", **number)
    add("top_k", "only the N most likely tokens; 0 is all (default: the model's own)", **integer)
    add("top_p", "only the most likely tokens whose probabilities add up to X (default: the model's own)", **number)
    add("min_p", "only tokens at least X times as likely as the first (default: the model's own)", **number)
    group = parser.add_argument_group("steering (tokens more or less likely, or impossible)")
    text = "above 1 makes what the prompt or the output has less likely (default: the model's own)"
    add("repetition_penalty", text, **number)
    add("presence_penalty", "-2 to 2, once for each token that the output has (default: 0)", **number)
    add("frequency_penalty", "-2 to 2, each time that the output has a token (default: 0)", **number)
    text = "add X, -100 to 100, to the logit of a token id: 100 forces it, -100 bans it; may be repeated"
    add("logit_bias", text, action="append", type=_bias, metavar="ID=X")
    add("allowed_token_ids", "nothing but these token ids", **ids)
    add("bad_words", "never this text, at the start or after a space; may be repeated", **texts)
    group = parser.add_argument_group("where a completion ends")
    add("stop", "end before this text; may be repeated", **texts)
    add("stop_token_ids", "end at these token ids", **ids)
    add("include_stop_str_in_output", "print the stop text or token too", action="store_true")
    add("ignore_eos", "generate --max-tokens tokens, past end-of-text tokens", action="store_true")
    group = parser.add_argument_group("what is shown")
    add("logprobs", "log-probability of each token, and the N most likely alternatives", **integer)
    add("prompt_logprobs", "the same for the prompt's tokens", **integer)
    add("skip_special_tokens", "print special tokens, such as <|im_end|>, by their names", action="store_false")


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given, by name."""
    given = {name.removeprefix(_PREFIX): value for name, value in vars(arguments).items() if name.startswith(_PREFIX)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def flag_error(message: str, given: Container[str]) -> str:
    """A message of the HTTP API about one of the given fields, with the flag's name in place of the field's."""
    match = _INVALID_FIELD.fullmatch(message)
    if match is None or match["field"] not in given:
        return message
    bound = _BOUND.fullmatch(match["what"])
    what = bound[1] if bound else match["what"]
    return f"{_flag(match['field'])}: {what.replace('max_tokens', '--max-tokens')}"


def _flag(field: str) -> str:
    return _FLAGS.get(field, "--" + field.replace("_", "-"))


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
