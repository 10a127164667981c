"""OpenAI's Responses API: `POST /v1/responses` and what belongs to it."""
