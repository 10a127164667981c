"""Parses an expression: recursive descent, one method for each rule of `eventlm.replay.expressions.syntax`."""

from __future__ import annotations

from typing import cast

from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.syntax import (
    COMPARISONS,
    Attribute,
    Binary,
    BinaryOperator,
    CallExpression,
    Expression,
    Keyword,
    Name,
    Node,
    Number,
    Text,
    Unary,
)
from eventlm.replay.expressions.tokens import Token, TokenKind, tokenize

RESERVED = ("and", "or", "not")
#: Parentheses, calls, `not` and `-` within each other.
MAX_DEPTH = 32
#: Operands and operators.
MAX_NODES = 200

_WORDS_OF_KINDS = {"end": "the end"}


def parse(source: str) -> Expression:
    """Raises ExpressionError."""
    try:
        return Expression(source=source, root=_Parser(tokenize(source)).whole())
    except ExpressionError as error:
        raise error.located(source) from None


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._index = 0
        self._depth = 0
        self._num_nodes = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._index]

    def whole(self) -> Node:
        node = self._disjunction()
        if self._next.kind != "end":
            self._fail("an operator or the end")
        return node

    def _disjunction(self) -> Node:
        left = self._conjunction()
        while operator := self._take("word", "or"):
            left = self._binary(operator, left, self._conjunction())
        return left

    def _conjunction(self) -> Node:
        left = self._negation()
        while operator := self._take("word", "and"):
            left = self._binary(operator, left, self._negation())
        return left

    def _negation(self) -> Node:
        operator = self._take("word", "not")
        if operator is None:
            return self._comparison()
        self._enter(operator)
        operand = self._negation()
        self._depth -= 1
        return self._counted(Unary(operator="not", operand=operand, column=operator.column))

    def _comparison(self) -> Node:
        left = self._sum()
        operator = self._take("sign", *COMPARISONS)
        if operator is None:
            return left
        node = self._binary(operator, left, self._sum())
        if self._next.kind == "sign" and self._next.text in COMPARISONS:
            raise ExpressionError(
                self._next.column, "comparisons cannot be chained; join two with `and`, such as 2 < n and n < 5"
            )
        return node

    def _sum(self) -> Node:
        left = self._product()
        while operator := self._take("sign", "+", "-"):
            left = self._binary(operator, left, self._product())
        return left

    def _product(self) -> Node:
        left = self._signed()
        while operator := self._take("sign", "*", "/"):
            left = self._binary(operator, left, self._signed())
        return left

    def _signed(self) -> Node:
        operator = self._take("sign", "-")
        if operator is None:
            return self._attribute()
        self._enter(operator)
        operand = self._signed()
        self._depth -= 1
        return self._counted(Unary(operator="-", operand=operand, column=operator.column))

    def _attribute(self) -> Node:
        node = self._primary()
        while self._take("sign", "."):
            name = self._name("the name of an attribute")
            node = self._counted(Attribute(of=node, name=name.text, column=name.column))
        return node

    def _primary(self) -> Node:
        token = self._next
        if opened := self._take("sign", "("):
            self._enter(opened)
            node = self._disjunction()
            self._close(opened)
            return node
        if token.kind == "word" and token.text not in RESERVED:
            self._index += 1
            opened = self._take("sign", "(")
            if opened is not None:
                return self._call(token, opened)
            return self._counted(Name(name=token.text, column=token.column))
        if token.kind not in ("number", "text"):
            self._fail("a number, a text or a name")
        self._index += 1
        if token.kind == "number":
            return self._counted(Number(value=token.value, column=token.column))
        return self._counted(Text(value=token.text, column=token.column))

    def _call(self, name: Token, opened: Token) -> Node:
        self._enter(opened)
        arguments: list[Node] = []
        keywords: list[Keyword] = []
        while not self._is_sign(")"):
            first = self._next
            if first.kind == "word" and self._tokens[self._index + 1][:2] == ("sign", "="):
                self._index += 2
                keyword = Keyword(name=first.text, value=self._disjunction(), column=first.column)
                if any(other.name == keyword.name for other in keywords):
                    raise ExpressionError(first.column, f"{first.text} is given twice")
                keywords.append(keyword)
            elif keywords:
                raise ExpressionError(first.column, "an argument without a name goes before those with one")
            else:
                arguments.append(self._disjunction())
            if not self._take("sign", ","):
                break
        self._close(opened)
        return self._counted(CallExpression(name=name.text, arguments=arguments, keywords=keywords, column=name.column))

    def _binary(self, operator: Token, left: Node, right: Node) -> Node:
        return self._counted(
            Binary(operator=cast(BinaryOperator, operator.text), left=left, right=right, column=operator.column)
        )

    def _counted(self, node: Node) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise ExpressionError(node.column, f"an expression has at most {MAX_NODES} operands and operators")
        return node

    def _enter(self, token: Token) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(token.column, f"it is nested more than {MAX_DEPTH} deep")

    def _close(self, opened: Token) -> None:
        if not self._take("sign", ")"):
            self._fail(f"the ) that belongs to column {opened.column}")
        self._depth -= 1

    def _is_sign(self, text: str) -> bool:
        return self._next.kind == "sign" and self._next.text == text

    def _take(self, kind: TokenKind, *texts: str) -> Token | None:
        """The next token if it is one of these."""
        token = self._next
        if token.kind != kind or token.text not in texts:
            return None
        self._index += 1
        return token

    def _name(self, wanted: str) -> Token:
        token = self._next
        if token.kind != "word" or token.text in RESERVED:
            self._fail(wanted)
        self._index += 1
        return token

    def _fail(self, wanted: str) -> None:
        token = self._next
        if token.kind == "sign" and token.text == "=":
            raise ExpressionError(token.column, "= gives an argument of a call a name; write == to compare")
        found = _WORDS_OF_KINDS.get(token.kind) or repr(token.text)
        raise ExpressionError(token.column, f"expected {wanted}, not {found}")
