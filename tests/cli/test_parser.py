"""The exit codes in the help of commands."""

from __future__ import annotations

import re

import pytest

from eventlm.cli.main import main
from eventlm.cli.parser import exit_code_lines
from eventlm.errors import ExitCode


def test_own_meanings_replace_those_of_the_table() -> None:
    text = exit_code_lines(ExitCode.USAGE, ExitCode.OK, ExitCode.GAP, meanings={ExitCode.OK: "all verified"})
    lines = text.splitlines()
    assert lines[:2] == ["exit codes:", "  0   all verified"]
    assert lines[-1] == "  14  events were not recorded"
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["serve"], {0, 1, 2}),
        (["explain"], {0, 2, 3, 4, 10, 11, 12, 13, 14}),
        (["replay"], {0, 1, 2, 3, 4, 10, 11, 12, 13, 14}),
        (["trace"], {0, 2, 3, 4, 10, 13}),
        (["trace", "diff"], {0, 2, 3, 4, 10, 13}),
        (["sweep"], {0, 1, 2, 130}),
        (["bench", "serve"], {0, 1, 2, 130}),
    ],
)
def test_help_lists_the_codes_of_a_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], codes: set[int]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    listed = capsys.readouterr().out.partition("exit codes:\n")[2]
    assert {int(number) for number in re.findall(r"^  (\d+) ", listed, re.MULTILINE)} == codes
