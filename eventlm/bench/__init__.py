"""Load tests of OpenAI-compatible servers and of the engine itself."""
