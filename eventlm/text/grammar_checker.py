"""Checks whether llguidance can build a grammar, before its request arrives, and finds the faulty part of a schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from eventlm.grammars import GrammarError, GrammarThreads, build_matcher, make_tokenizer
from eventlm.text.grammar import OWN_OPTIONS, RequestedGrammar, asks_for_structure, invalid_grammar, requested_grammar
from eventlm.text.protocol import GenerationRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Grammars checked at a time. Each takes at most a second.
_NUM_THREADS = 2
_NUM_BYTES = 256
#: How far a grammar is followed. Too much complexity shows within a few tokens.
_NUM_TRIED_TOKENS = 4
#: How many parts of a schema are tried to find the faulty one.
_NUM_TRIED_PARTS = 200
#: Keywords of JSON schema whose value is one schema, a list of schemas, or an object of schemas.
_WITH_SCHEMA = ("items", "additionalItems", "additionalProperties", "contains", "not")
_WITH_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_WITH_OBJECT = ("properties", "patternProperties", "$defs", "definitions")


class GrammarChecker:
    """Checks grammars in threads, for a vocabulary of all bytes and the model's special tokens."""

    def __init__(self, special_tokens: list[bytes]) -> None:
        self._special_tokens = special_tokens
        self._threads: GrammarThreads | None = None
        self._tokenizer: LLTokenizer | None = None

    async def requested(self, request: GenerationRequest) -> str:
        """The grammar that a request asks for, empty if none. Raises InputError, as `check` does."""
        if not asks_for_structure(request):
            return ""
        return await self._run(lambda: self._checked(requested_grammar(request)))

    async def check(self, requested: RequestedGrammar) -> str:
        """The grammar; raises InputError if it is contradictory, not supported or too complex."""
        return await self._run(lambda: self._checked(requested))

    def check_now(self, requested: RequestedGrammar) -> str:
        """`check` without an event loop."""
        return self._started().submit(self._checked, requested).result()

    def close(self) -> None:
        """Release the threads and drop the grammars that wait."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], str]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._started(), work)

    def _started(self) -> GrammarThreads:
        if self._threads is None:
            self._threads = GrammarThreads(_NUM_THREADS)
        return self._threads

    def _checked(self, requested: RequestedGrammar) -> str:
        grammar, param = requested
        if grammar:
            try:
                self._build(grammar)
            except GrammarError as error:
                part, detail = self._faulty_part(grammar, param, str(error))
                raise invalid_grammar(part, detail) from error
        return grammar

    def _build(self, grammar: str) -> None:
        """Build it and follow it for a few bytes. Raises GrammarError."""
        matcher = build_matcher(self._byte_tokenizer(), grammar)
        num_tokens = _NUM_BYTES + len(self._special_tokens)
        for position in range(_NUM_TRIED_TOKENS):
            allowed = _allowed_tokens(matcher, num_tokens)
            if not allowed and not position:
                raise GrammarError("it allows no text but the empty one")
            if not allowed or not matcher.consume_token(allowed[-1]):
                break
        if matcher.is_error():
            raise GrammarError("it is too complex")

    def _byte_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            tokens = [bytes([byte]) for byte in range(_NUM_BYTES)] + self._special_tokens
            self._tokenizer = make_tokenizer(tokens, dict(enumerate(self._special_tokens, start=_NUM_BYTES)))
        return self._tokenizer

    def _faulty_part(self, grammar: str, param: str, detail: str) -> tuple[str, str]:
        """Param and detail of the innermost part of a schema that cannot be built; unchanged without a schema."""
        root = json.loads(grammar)["grammars"][0].get("json_schema")
        if not root:
            return param, detail
        if self._fault({"type": "object", OWN_OPTIONS: root.get(OWN_OPTIONS)}) == detail:
            # The client's whitespace pattern is the only one of the options that can be wrong.
            return f"{param.rpartition('.')[0]}.whitespace_pattern", detail
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        schema, num_tried = root, 0
        while True:
            for name, part in _parts(schema):
                num_tried += 1
                if num_tried > _NUM_TRIED_PARTS:
                    return param, detail
                found = self._fault(definitions | part)
                # A part that nothing matches may be optional.
                if found and (found == detail or (_is_contradiction(found) and _is_contradiction(detail))):
                    schema, param, detail = part, f"{param}{name}", found
                    break
            else:
                return param, detail

    def _fault(self, schema: dict[str, Any]) -> str:
        """The error of a schema; empty if it can be built."""
        try:
            build_matcher(self._byte_tokenizer(), json.dumps({"grammars": [{"json_schema": schema}]}))
        except GrammarError as error:
            return str(error)
        return ""


def _is_contradiction(detail: str) -> bool:
    return detail.startswith("Unsatisfiable")


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within a schema, each with its path relative to that."""
    for key in _WITH_OBJECT:
        if isinstance(parts := schema.get(key), dict):
            yield from ((f".{key}.{name}", part) for name, part in parts.items() if isinstance(part, dict))
    for key in _WITH_LIST:
        if isinstance(parts := schema.get(key), list):
            yield from ((f".{key}[{index}]", part) for index, part in enumerate(parts) if isinstance(part, dict))
    for key in _WITH_SCHEMA:
        if isinstance(part := schema.get(key), dict):
            yield f".{key}", part


def _allowed_tokens(matcher: LLMatcher, num_tokens: int) -> list[int]:
    """Tokens that may follow, without the end of the text."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [token_id for token_id in range(num_tokens) if mask >> token_id & 1]
