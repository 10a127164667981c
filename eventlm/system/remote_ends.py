"""What a process needs to open its end of a pipe to a parent on another host. It imports no asyncio."""

from __future__ import annotations

import os

import msgspec
import zmq
from msgspec import Struct

#: Environment variable with a child's `RemoteEnds`, which a command line would show to all users.
VARIABLE = "EVENTLM_PIPE"


class RemoteEnds(Struct, frozen=True):
    """What a child needs to open its end beside the two addresses: keys, and where the parent's pulses come from."""

    pulses: str
    server: bytes
    public: bytes
    secret: bytes

    def environment(self) -> dict[str, str]:
        """To be given to the child."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def take(cls) -> RemoteEnds | None:
        """Those given to this process, whose own children will not see them; None if its parent is on this host."""
        text = os.environ.pop(VARIABLE, "")
        return msgspec.json.decode(text, type=cls) if text else None

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket of the child speak to the parent alone."""
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self.server, self.public, self.secret
