"""Tool calls and reasoning: in prompts, in grammars, and parsed from a model's text.

`formats.py` has the two kinds of plug-ins, with the built-in ones. Parsers are incremental: their events, joined, do
not depend on how the text was cut.
"""
