"""Ollama's API: everything that generates or only reads. Models are not changed over it."""
