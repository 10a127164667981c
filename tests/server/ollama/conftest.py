from __future__ import annotations

from tests.server.ollama.clients import start_with_ollama

__all__ = ["start_with_ollama"]
