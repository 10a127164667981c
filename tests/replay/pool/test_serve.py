from __future__ import annotations

import signal
import subprocess
import sys

import msgspec

from tests.replay.pool.echo import Answer


def test_lines_in_and_lines_out_whatever_is_printed() -> None:
    command = [sys.executable, "-m", "tests.replay.pool.echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"text":"a"}\n')
        process.stdin.flush()
        assert msgspec.json.decode(process.stdout.readline(), type=Answer).text == "a"
        # Ctrl-C reaches every process of a terminal; the parent decides.
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(b'{"text":"b"}\n', timeout=30)
        assert msgspec.json.decode(output, type=Answer).text == "b"
        assert b"plug-ins may print b" in errors
        assert process.returncode == 0
