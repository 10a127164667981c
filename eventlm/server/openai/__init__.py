"""OpenAI's API: chat, completions, embeddings, and the structs that other APIs share."""
