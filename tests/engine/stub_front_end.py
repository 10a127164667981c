"""A front-end process that behaves as the variable STUB_FRONT_END says, a word for each of its starts:

ready: starts, beats, leaves when it is told to. silent: starts and says nothing more. stubborn: starts, beats, never
leaves. fails: says that it cannot start. dies: ends at once. The last word counts for all further starts. How often it
was started is the length of the file STUB_STARTS.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from eventlm.frontend.protocol import (
    Beat,
    Draining,
    FrontEndFailed,
    FrontEndReady,
    FrontEndSetup,
    Signal,
    decode_to_front_end,
    encode,
)


def number_of_start() -> int:
    path = Path(os.environ["STUB_STARTS"])
    with path.open("ab") as file:
        file.write(b".")
    return path.stat().st_size - 1


def main() -> None:
    words = os.environ["STUB_FRONT_END"].split()
    word = words[min(number_of_start(), len(words) - 1)]
    control = socket.socket(fileno=int(sys.argv[1]))
    stream = control.makefile("rb")

    def receive() -> Any:
        header = stream.read(4)
        if not header:
            sys.exit(1)
        return decode_to_front_end(stream.read(int.from_bytes(header)))

    def send(message: Any) -> None:
        body = encode(message)
        control.sendall(len(body).to_bytes(4) + body)

    setup = receive()
    assert isinstance(setup, FrontEndSetup)
    assert socket.socket(fileno=int(sys.argv[2])).getsockname()
    if word == "dies":
        sys.exit(7)
    if word == "fails":
        send(FrontEndFailed("there is no tokenizer.json"))
        sys.exit(1)
    send(FrontEndReady())
    beat = Beat(num_requests=setup.index, cpu_ns=5, resident_bytes=6, http_requests=[("/", "GET", "2xx", 3, 30)])
    signal.signal(signal.SIGALRM, lambda *_: send(beat))
    if word != "silent":
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.05)
    while True:
        message = receive()
        if message == Signal("reload"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(Beat(num_requests=99, cpu_ns=5, resident_bytes=6))
        if message == Signal("drain"):
            send(Draining(3))
            if word == "ready":
                # At once: the timer's signal would kill an interpreter that is ending.
                os._exit(0)
            while True:
                time.sleep(60)


if __name__ == "__main__":
    main()
