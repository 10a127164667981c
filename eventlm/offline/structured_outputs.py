"""The structure of completions, as callers of `LLM` ask for it: vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec

from eventlm.errors import InputError
from eventlm.offline.errors import InvalidInputError
from eventlm.text.grammar import RequestedGrammar, structured_outputs_grammar
from eventlm.text.protocol import StructuredOutputs


@dataclass
class StructuredOutputsParams:
    """What a completion must match: exactly one of the first five.

        StructuredOutputsParams(json={"type": "object", ...})      a JSON schema, or its text
        StructuredOutputsParams(regex=r"\\d{4}")                    the whole text
        StructuredOutputsParams(choice=["yes", "no"])
        StructuredOutputsParams(grammar='start: "a" | "b"')        Lark, or GBNF

    Between the tokens of JSON there may be some whitespace: none with `disable_any_whitespace`, else what
    `whitespace_pattern` (a regular expression) matches.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def requested(self) -> RequestedGrammar:
        """As a grammar. Raises InvalidInputError that names the part at fault."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            return structured_outputs_grammar(msgspec.convert(given, StructuredOutputs))
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"structured_outputs: {error}") from error
        except InputError as error:
            raise InvalidInputError(str(error)) from error
