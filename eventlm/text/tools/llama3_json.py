"""`{"name": ..., "parameters": ...}`, alone or behind `<|python_tag|>`: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from eventlm.text.tools.call_parser import CallSyntax
from eventlm.text.tools.formats import ToolFormat


class Llama3Json(ToolFormat):
    """A reply that is a call from its first character on; several are separated by semicolons."""

    syntax = CallSyntax(
        begin="<|python_tag|>", arguments_key="parameters", is_bare=True, layout=("", ""), separator="; "
    )

    @classmethod
    def detects(cls, template: str) -> bool:
        return cls.syntax.begin in template or ("ipython" in template and '"parameters": ' in template)
