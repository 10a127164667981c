"""That text, batches and local commands work where no HTTP library is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{statement}
loaded = sorted(name for name in sys.modules if name == "aiohttp" or name.startswith("eventlm.server"))
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import eventlm.text.request_builder, eventlm.text.generation, eventlm.text.tools.message",
        "from eventlm import LLM, SamplingParams",
        "import eventlm.bench.engine_bench, eventlm.bench.step.measure",
        "import eventlm.cli.generate, eventlm.text.request_builder",
    ],
)
def test_neither_the_server_nor_aiohttp_is_loaded(statement: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM.format(statement=statement)], check=True)
