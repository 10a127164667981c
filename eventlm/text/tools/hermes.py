"""`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, and many others."""

from __future__ import annotations

from eventlm.text.tools.call_parser import CallSyntax
from eventlm.text.tools.formats import ToolFormat

#: Between the same tags stands something else: Qwen3-Coder, GLM-4.5.
_OTHER_FORMATS = ("<function=", "<arg_key>")


class Hermes(ToolFormat):
    """Calls between tags."""

    syntax = CallSyntax(
        begin="<tool_call>", end="</tool_call>", layout=("<tool_call>\n", "\n</tool_call>"), separator="\n"
    )

    @classmethod
    def detects(cls, template: str) -> bool:
        return cls.syntax.begin in template and not any(other in template for other in _OTHER_FORMATS)
