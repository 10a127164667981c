"""Tool calls and reasoning: how they are asked of a model, and found in what it says.

`formats.py` has the two kinds of plug-ins and finds them; `hermes.py`, `llama3_json.py` and `think.py` are the
built-in ones. The parsers are incremental text machines: text goes in as it comes, pieces of a message come out, and
joined they do not depend on how the text was cut.
"""
