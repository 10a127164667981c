"""Requests that other servers answer: what they get, and token ids that stand for their prompts."""
