"""The structure that a request asks for, as the text of an llguidance grammar.

The functions check their input and raise InputError with the `param` at fault. Whether llguidance can build the grammar
is checked by `GrammarChecker`, in a thread. A Lark grammar may contain the JSON of a `compiled_schema` after `%json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError
from eventlm.grammars import MAX_GRAMMAR_CHARACTERS
from eventlm.sampling_params import StructuredOutputsParams
from eventlm.text.protocol import GenerationRequest, ResponseFormat

#: Between two tokens of a JSON text. Without a bound a model could write it for ever.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
#: Types of `response_format`, and the type that each of its fields belongs to.
_TYPES = ("text", "json_object", "json_schema")
_TYPE_OF_SCHEMA = {"json_schema": "json_schema", "schema": "json_object"}
#: The key of llguidance's options in a schema.
OWN_OPTIONS = "x-guidance"
MAX_CHOICES = 4096
#: An escape, the start of a class (with a bracket as its first character), or any other character.
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
#: Python and Rust differ in control characters among spaces, and in marks and numbers among letters.
_COMMON = {r"\d": "[0-9]", r"\w": r"[\p{L}\p{Nd}_]", r"\W": r"[^\w\p{N}]", r"\S": r"[^\s\x1c-\x1f]"}
_IN_NEGATED = {r"\s": r"\s\x1c-\x1f", r"\w": r"\w\p{N}", r"\W": r"[^\p{L}\p{Nd}_]"}


class RequestedGrammar(NamedTuple):
    """A grammar and the field that asked for it; both are empty if there is none."""

    grammar: str
    param: str


def asks_for_structure(request: GenerationRequest) -> bool:
    """Whether any field asks for a structure."""
    return any(getattr(request, name) is not None for name in _FIELDS)


def requested_grammar(request: GenerationRequest) -> RequestedGrammar:
    """The grammar for a request. Raises InputError if a field is wrong, or several ask for a structure."""
    asked = [(name, value) for name in _FIELDS if (value := getattr(request, name)) is not None]
    found = [grammar for name, value in asked if (grammar := _grammar_of(name, value)).grammar]
    if len(found) > 1:
        raise InputError(
            found[1].param,
            f"Invalid value for '{found[1].param}': the output cannot have two structures, and "
            f"'{found[0].param}' asks for one already.",
        )
    return found[0] if found else RequestedGrammar("", "")


def _grammar_of(name: str, value: Any) -> RequestedGrammar:
    if isinstance(value, ResponseFormat):
        return _response_format(value)
    if isinstance(value, StructuredOutputsParams):
        return structured_outputs_grammar(value)
    return RequestedGrammar(_GUIDED[name](value, name), name)


def _response_format(asked: ResponseFormat) -> RequestedGrammar:
    for name, type in _TYPE_OF_SCHEMA.items():
        if getattr(asked, name) is not None and asked.type in _TYPES and asked.type != type:
            param = f"response_format.{name}"
            raise InputError(param, f"'{param}' is only allowed where 'response_format.type' is '{type}'.")
    match asked.type:
        case "text":
            return RequestedGrammar("", "")
        case "json_object":
            if asked.schema is None:
                return RequestedGrammar(json_object_grammar(), "response_format")
            # llama.cpp's form with a schema beside the type.
            param = "response_format.schema"
            return RequestedGrammar(json_schema_grammar(asked.schema, param), param)
        case "json_schema":
            if asked.json_schema is None:
                raise MissingParameterError("response_format.json_schema")
            if asked.json_schema.schema is None:
                raise MissingParameterError("response_format.json_schema.schema")
            param = "response_format.json_schema.schema"
            return RequestedGrammar(json_schema_grammar(asked.json_schema.schema, param), param)
        case _:
            raise InputError(
                "response_format.type",
                f"Invalid value for 'response_format.type': supported values are {', '.join(map(repr, _TYPES))}.",
            )


def structured_outputs_grammar(asked: StructuredOutputsParams) -> RequestedGrammar:
    """The grammar for vLLM's `structured_outputs`. Raises InputError."""
    if asked.structural_tag is not None:
        raise InputError(
            "structured_outputs.structural_tag", "'structured_outputs.structural_tag' is not supported; leave it out."
        )
    if asked.disable_additional_properties:
        raise InputError(
            "structured_outputs.disable_additional_properties",
            "'structured_outputs.disable_additional_properties' is not supported; write 'additionalProperties': false "
            "into the schema.",
        )
    kinds = {"json": asked.json, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
    given = [name for name, value in kinds.items() if value is not None]
    if asked.json_object:
        given.append("json_object")
    if len(given) != 1:
        raise InputError(
            "structured_outputs",
            "Invalid value for 'structured_outputs': exactly one of 'json', 'regex', 'choice', 'grammar' and "
            f"'json_object' is needed, got {' and '.join(map(repr, given)) or 'none'}.",
        )
    [kind] = given
    param = f"structured_outputs.{kind}"
    whitespace = _whitespace(asked, is_json=kind in ("json", "json_object"))
    if kind == "json_object":
        return RequestedGrammar(json_object_grammar(whitespace), param)
    if kind == "json":
        return RequestedGrammar(json_schema_grammar(asked.json, param, whitespace), param)
    return RequestedGrammar(_GUIDED[f"guided_{kind}"](kinds[kind], param), param)


def _whitespace(asked: StructuredOutputsParams, *, is_json: bool) -> str:
    """The pattern of whitespace between the tokens of JSON; empty if none is allowed. Raises InputError."""
    asks = [name for name in ("disable_any_whitespace", "whitespace_pattern") if getattr(asked, name)]
    if len(asks) > (1 if is_json else 0):
        param = f"structured_outputs.{asks[-1]}"
        conflict = "beside 'disable_any_whitespace'" if is_json else "where the structure is not JSON"
        raise InputError(param, f"'{param}' is not allowed {conflict}; leave it out.")
    if asked.disable_any_whitespace:
        return ""
    return asked.whitespace_pattern or JSON_WHITESPACE


def json_object_grammar(whitespace: str = JSON_WHITESPACE) -> str:
    """The grammar of any JSON object."""
    return json_schema_grammar({"type": "object"}, "", whitespace)


def json_schema_grammar(schema: Any, param: str, whitespace: str = JSON_WHITESPACE) -> str:
    """The grammar of JSON that is valid under a schema: a dict, a bool, or the text of one."""
    return grammar_of_parts([{"json_schema": compiled_schema(schema, param, whitespace)}], param)


def compiled_schema(schema: Any, param: str, whitespace: str = JSON_WHITESPACE) -> dict[str, Any]:
    """A schema with llguidance's options, as `%json` takes it. Raises InputError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InputError(param, f"Invalid value for '{param}': it is not JSON.") from error
    if schema is True:
        schema = {}
    if schema is False:
        raise invalid_grammar(param, "nothing can match it")
    if not isinstance(schema, dict):
        raise InvalidTypeError(param, f"Invalid type for '{param}': expected a JSON schema, which is an object.")
    options = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {name: value for name, value in schema.items() if name != OWN_OPTIONS} | {OWN_OPTIONS: options}


def regex_grammar(regex: str, param: str) -> str:
    """The grammar of texts that a regular expression matches as a whole."""
    from llguidance import LLMatcher

    _check_size(regex, param)
    try:
        grammar = LLMatcher.grammar_from_regex(_with_common_classes(regex))
    except UnicodeEncodeError as error:
        raise invalid_grammar(param, "it has half of a surrogate pair") from error
    _check_size(grammar, param)
    return grammar


def _with_common_classes(regex: str) -> str:
    """The expression with classes such as `\\w` as narrow as in both Python and Rust, and `\\d` as ASCII digits."""
    found: list[str] = []
    #: For each open class, whether it is negated.
    classes: list[bool] = []
    for part in _REGEX_PARTS.findall(regex):
        if part.startswith("["):
            classes.append(part.startswith("[^"))
        elif part == "]" and classes:
            classes.pop()
        else:
            part = (_IN_NEGATED if any(classes) else _COMMON).get(part, part)
        found.append(part)
    return "".join(found)


def choice_grammar(choices: list[str], param: str) -> str:
    """The grammar of one of several texts."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InputError(
            param, f"Invalid value for '{param}': 1 to {MAX_CHOICES} choices are allowed, got {len(choices)}."
        )
    if empty := [index for index, choice in enumerate(choices) if not choice]:
        raise InputError(f"{param}[{empty[0]}]", f"Invalid value for '{param}[{empty[0]}]': it is empty.")
    return lark_grammar("start: " + " | ".join(map(lark_string, choices)), param)


def lark_string(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text)


def text_grammar(text: str, param: str) -> str:
    """A grammar given in llguidance's Lark, or in llama.cpp's GBNF, which has `::=`."""
    from llguidance.gbnf_to_lark import any_to_lark

    _check_size(text, param)
    try:
        lark = any_to_lark(text)
    except RecursionError as error:
        raise invalid_grammar(param, "it is nested too deeply") from error
    except Exception as error:  # the converter raises plain Exception
        raise invalid_grammar(param, str(error)) from error
    return lark_grammar(lark, param)


def lark_grammar(text: str, param: str) -> str:
    """A grammar in llguidance's Lark."""
    return grammar_of_parts([{"lark_grammar": text}], param)


def grammar_of_parts(parts: list[dict[str, Any]], param: str) -> str:
    """llguidance's JSON of several grammars. The first uses the others as `@name`."""
    try:
        grammar = json.dumps({"grammars": parts}, separators=(",", ":"))
    except RecursionError as error:
        raise invalid_grammar(param, "it is nested too deeply") from error
    _check_size(grammar, param)
    return grammar


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise invalid_grammar(param, f"it is too large: at most {MAX_GRAMMAR_CHARACTERS} characters are allowed")


def invalid_grammar(param: str, detail: str) -> InputError:
    """The error for a grammar or a schema at `param`."""
    return InputError(param or None, f"Invalid value for '{param}': {detail.rstrip('.')}.")


#: vLLM's older fields, each with the function for its grammar.
_GUIDED: dict[str, Callable[[Any, str], str]] = {
    "guided_json": json_schema_grammar,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": text_grammar,
}
_FIELDS = ("response_format", "structured_outputs", *_GUIDED)
