"""What counts the prompts of backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bootstrap.text_parts import load_text
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.checkpoints import make_tokenizer


@pytest.mark.parametrize(
    ("name", "kind"), [("", PieceTokenizer), ("fake", FakeTokenizer), ("folder", CheckpointTokenizer)]
)
def test_backends_go_by_pieces_or_by_the_tokenizer_that_is_given(name: str, kind: type, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    make_tokenizer(folder)
    text = load_text("", "auto", str(folder) if name == "folder" else name)
    assert (type(text.tokenizer), text.forwards) == (kind, True)
    assert not load_text("fake", "auto").forwards
