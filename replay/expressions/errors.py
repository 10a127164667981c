"""The error of the language, which points at a column."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from eventlm.errors import UsageError

#: So many names are listed where no similar one is known.
_MAX_LISTED = 20


class ExpressionError(UsageError):
    """An expression cannot be read or evaluated.

    column: counted from 1. source: the whole expression; "" until it is known. The message is one line.
    """

    def __init__(self, column: int, problem: str, source: str = "") -> None:
        super().__init__(column, problem, source)
        self.column = column
        self.problem = problem
        self.source = source

    def __str__(self) -> str:
        where = f"column {self.column} of {self.source!r}" if self.source else f"column {self.column}"
        return f"{where}: {self.problem}"

    @property
    def pointer(self) -> str:
        """The expression, and a line below it with a caret at the column."""
        return f"{self.source}\n{' ' * (self.column - 1)}^"

    def located(self, source: str) -> ExpressionError:
        """The same with its source."""
        return ExpressionError(self.column, self.problem, source)


def not_known(what: str, name: str, column: int, known: Iterable[str]) -> ExpressionError:
    """The error for a name that means nothing here. `what`: such as "name" or "function"."""
    names = sorted(known)
    similar = get_close_matches(name, names, n=1)
    if similar:
        hint = f"did you mean {similar[0]}?"
    elif names:
        more = "" if len(names) <= _MAX_LISTED else f" and {len(names) - _MAX_LISTED} more"
        hint = f"there are {', '.join(names[:_MAX_LISTED])}{more}"
    else:
        hint = "there is none here"
    return ExpressionError(column, f"there is no {what} {name}; {hint}")
