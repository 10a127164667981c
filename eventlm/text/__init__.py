"""Text on one side, token ids on the other: all that lies between a prompt as people write it and the engine.

`requests` reads request bodies in OpenAI's shapes, `tools` finds tool calls and reasoning, `generation` turns the
engine's tokens into text. Nothing here imports the server or an HTTP library: the server, `eventlm.offline`, the
benchmarks and the command line's local commands all build on it. What a client got wrong is an `InputError`.
"""
