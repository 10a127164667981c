"""The log: JSON lines for programs, text for people, tracebacks without what local variables hold."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

CODE = """
import logging, structlog
from eventlm.cli.logging_setup import configure_logging
configure_logging()
log = structlog.get_logger("eventlm.test")
log.debug("unseen")
log.info("seen", number=3)
logging.getLogger("library").warning("of %s", "a library")
def fail():
    local = "canary"
    raise ZeroDivisionError
try:
    fail()
except ZeroDivisionError:
    log.exception("failed")
"""


def test_json_lines_where_no_person_reads() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    seen, library, failed = map(json.loads, done.stderr.splitlines())
    assert (seen["event"], seen["level"], seen["logger"], seen["number"]) == ("seen", "info", "eventlm.test", 3)
    assert (library["event"], library["level"], library["logger"]) == ("of a library", "warning", "library")
    assert failed["exception"].startswith("Traceback (most recent call last):")
    assert failed["exception"].endswith("ZeroDivisionError")
    assert "canary" not in done.stderr
    assert done.stdout == ""


def test_text_on_a_terminal() -> None:
    reader, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", CODE], stderr=terminal, timeout=60, check=True)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(reader, 65536)
        except OSError:  # what the terminal's master says once all is read
            break
    os.close(reader)
    text = shown.decode()
    assert "seen" in text
    assert "unseen" not in text
    assert "Traceback (most recent call last):" in text
    assert "canary" not in text
    assert "{" not in text
