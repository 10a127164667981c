"""A front end of a keeper that says hello over each connection."""

from __future__ import annotations

import socket
import sys


def main() -> None:
    control, listening, word = sys.argv[1:]
    assert word == "kept"
    assert socket.socket(fileno=int(listening)).getsockname()
    pair = socket.socket(fileno=int(control))
    kept = []
    while True:
        number, descriptors, _, _ = socket.recv_fds(pair, 4, 1)
        if not number:
            return
        kept += [socket.socket(fileno=each) for each in descriptors]
        kept[-1].sendall(f"connection {len(kept)}".encode())


if __name__ == "__main__":
    main()
