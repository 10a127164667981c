"""A client of any OpenAI-compatible server, which the terminal chat and the benchmarks share."""
