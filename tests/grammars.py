"""Grammars in tests: whether a text matches one, and random schemas and regular expressions of bounded texts."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

from eventlm.grammars import build_matcher, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NUM_BYTES = 256


@cache
def byte_tokenizer() -> LLTokenizer:
    """A vocabulary of all bytes."""
    return make_tokenizer([bytes([byte]) for byte in range(NUM_BYTES)], {})


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text matches."""
    matcher = build_matcher(byte_tokenizer(), grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def is_prefix(grammar: str, text: bytes) -> bool:
    """Whether some text that begins like this matches."""
    return build_matcher(byte_tokenizer(), grammar).try_consume_tokens(list(text)) == len(text)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts have at most a few hundred characters."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "number"]
    kind = rng.choice(kinds + (["object", "object", "array", "anyOf", "tuple"] * 2 if depth else []))
    match kind:
        case "object":
            return _random_object(rng, depth)
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
        case "tuple":
            parts = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
        case "string":
            low = rng.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
        case "number":
            return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": rng.randint(1, 99)}
        case "enum":
            values: list[Any] = ["a", "\u00e9t\u00e9", 1, -2, None, True, "two words", '"quoted"', "\U0001f680"]
            return {"enum": rng.sample(values, rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice([7, "x", None, False, "\u65e5\u672c"])}
        case "pattern":
            return {"type": "string", "pattern": f"^{random_regex(rng, depth=1)}$"}
        case _:
            return {"type": kind}


def _random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "gr\u00f6\u00dfe", "two words", "tags", "x", "meta"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """A regular expression whose texts have at most some hundred characters, and at least one."""
    return "".join(_random_piece(rng, depth) for _ in range(rng.randint(1, 3)))


def _random_piece(rng: random.Random, depth: int) -> str:
    low = rng.randint(1, 3)
    times = rng.choice(["", "", f"{{{low}}}", f"{{{low},{low + rng.randint(0, 3)}}}"])
    if depth and rng.random() < 0.4:
        return f"(?:{random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)}){times}"
    return (
        rng.choice(["[a-z]", "[A-F0-9]", r"\d", "x", "yes", r"\.", "-", "[^a-z\\s]", "\u00fc", "[\u3041-\u3096]"])
        + times
    )
