"""Endpoints and fields that vLLM has beside OpenAI's API."""
