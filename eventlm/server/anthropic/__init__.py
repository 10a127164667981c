"""Anthropic's API: messages, the tokens of their prompts, and models."""
