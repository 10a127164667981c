"""Numbers as people read them."""

from __future__ import annotations

import pytest

from eventlm.wording import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 events"), (1, "1 event"), (2, "2 events"), (1234, "1,234 events")])
def test_counts_have_their_plural_and_separators(number: int, text: str) -> None:
    assert counted(number, "event") == text
