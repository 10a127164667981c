"""How a quantized matrix [out, in] lies in a checkpoint: the tensors that it consists of. Loads no torch.

A weight is `scale * (code - zero)`. Codes of `gptq`, `awq` and `packed` lie in words of 32 bits, the lowest first:

    gptq    of the inputs of an output, words [in / 8, out] with 4 bits
    awq     of the outputs of an input, words [in, out / 8], in the order of `AWQ_ORDER`
    packed  of the inputs of an output, words [out, in / 8], as compressed-tensors packs them
    bytes   signed 8-bit integers [out, in]
    fp8     floats of 8 bits (E4M3) [out, in]
    fp4     two floats of 4 bits (E2M1) in a byte, [out, in / 2], the scales powers of two (E8M0), as MXFP4 has them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from eventlm.types import ceil_div

#: Where the outputs of a word lie in it, the lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Of a word of codes.
WORD_BITS = 32
CONFIG_FILE = "config.json"
_FLOATS = ("BF16", "F16", "F32")
#: The parts of a quantized matrix, after the name of its module and a dot. Not all of them belong to one layout.
PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "bias"),
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
)
#: Those that a matrix of floats has not: the codes.
CODES = ("qweight", "weight_packed")
#: Other names of parts.
ALIASES = {"weight_scale_inv": "weight_scale"}
#: What belongs to quantized activations or to a quantized cache, which are computed in their own way here.
LEFT_OUT = (
    *("input_scale", "input_scale_ub", "input_zero_point", "activation_scale", "output_scale"),
    *("q_scale", "k_scale", "v_scale"),
)


class PartSpec(NamedTuple):
    """A tensor of a matrix: the dtypes that it may have, and the shapes."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False


class Scheme(Struct, frozen=True, kw_only=True):
    """How a module's matrix lies in the files.

    group: how many outputs and inputs share a scale; 0: all of them. has_zeros: zeros of its own, else codes are signed
    or the zero is in their middle. has_order: a group's inputs are not neighbours; a tensor says which group each has.
    zero_shift: what is added to zeros as they are stored. is_exact: values are computed in float32, else in the dtype
    of the scales, as the library does that such checkpoints are made for.
    """

    layout: Literal["gptq", "awq", "packed", "bytes", "fp8", "fp4"]
    bits: int = 8
    group: tuple[int, int] = (1, 0)
    has_zeros: bool = False
    has_order: bool = False
    zero_shift: int = 0
    is_exact: bool = False

    def num_groups(self, num_in: int) -> int:
        """Groups of an output's inputs."""
        return ceil_div(num_in, self.group[1] or num_in)

    def parts(self, num_out: int, num_in: int) -> dict[str, PartSpec]:
        """The tensors of a matrix by their names in `PARTS`."""
        groups, codes = self.num_groups(num_in), WORD_BITS // self.bits
        dtypes = (*_FLOATS, "F8_E8M0") if self.layout == "fp8" else _FLOATS
        scales = PartSpec(dtypes, self._scale_shapes(num_out, num_in))
        match self.layout:
            case "gptq" | "awq":
                is_awq = self.layout == "awq"
                words = (num_in, ceil_div(num_out, codes)) if is_awq else (ceil_div(num_in, codes), num_out)
                found = {
                    "qweight": PartSpec(("I32",), (words,)),
                    "qzeros": PartSpec(("I32",), ((groups, ceil_div(num_out, codes)),)),
                    "scales": PartSpec(_FLOATS, ((groups, num_out),)),
                }
                if not is_awq:
                    found["g_idx"] = PartSpec(("I32",), ((num_in,),), is_optional=not self.has_order)
                    # AutoGPTQ wrote one of zeros where a model has none.
                    found["bias"] = PartSpec(_FLOATS, ((num_out,),), is_optional=True)
                return found
            case "packed":
                found = {
                    "weight_packed": PartSpec(("I32",), ((num_out, ceil_div(num_in, codes)),)),
                    "weight_scale": scales,
                    "weight_shape": PartSpec(("I64", "I32"), ((2,),)),
                }
                if self.has_zeros:
                    found["weight_zero_point"] = PartSpec(("I32",), ((ceil_div(num_out, codes), groups),))
                if self.has_order:
                    found["weight_g_idx"] = PartSpec(("I32",), ((num_in,),))
                return found
            case "fp4":
                return {
                    "weight_packed": PartSpec(("U8",), ((num_out, num_in // 2),)),
                    "weight_scale": PartSpec(("U8", "F8_E8M0"), ((num_out, groups),)),
                }
        found = {
            "weight": PartSpec(("I8",) if self.layout == "bytes" else ("F8_E4M3",), ((num_out, num_in),)),
            "weight_scale": scales,
        }
        if self.has_zeros:
            found["weight_zero_point"] = PartSpec(("I8",), scales.shapes)
        return found

    def packed_type(self, num_in: int) -> str:
        """The type of the compiled decoder's codes that hold such a matrix exactly; empty if none does."""
        outputs, inputs = self.group
        if num_in % 32 or inputs % 32 or self.has_order:
            return ""
        if self.layout == "fp4":
            return "MXFP4"
        if self.layout == "fp8":
            return "" if inputs % 128 else "F8_128"
        return "" if outputs > 1 else f"I{self.bits}_{32 if inputs % 128 else 128}"

    def _scale_shapes(self, num_out: int, num_in: int) -> tuple[tuple[int, ...], ...]:
        outputs, inputs = self.group
        if outputs == 0 and inputs == 0:
            # Where `fp8` names no blocks, it may be either.
            of_outputs = ((num_out, 1), (num_out,)) if self.layout == "fp8" else ()
            return (), (1,), (1, 1), *of_outputs
        shape = (ceil_div(num_out, outputs or num_out), self.num_groups(num_in))
        return (shape, shape[:1]) if shape == (num_out, 1) else (shape,)


class Rule(Struct, frozen=True):
    """The scheme of some modules; None: they are not quantized.

    Their names match a regular expression from the beginning, or have one of `ends`.
    """

    pattern: str
    scheme: Scheme | None
    ends: tuple[str, ...] = ()


class Method(Struct, frozen=True, kw_only=True):
    """What a file, `source`, says of all modules: the first rule that matches counts, or else `scheme`.

    Modules with a matrix of floats are not quantized, whatever it says: many a method never touches routers or the
    output matrix, and does not say so.
    """

    name: str
    scheme: Scheme | None
    rules: tuple[Rule, ...] = ()
    source: str = CONFIG_FILE

    def scheme_of(self, names: Sequence[str]) -> Scheme | None:
        """The scheme of a module, by all names that it has; None if it is not quantized."""
        for rule in self.rules:
            if any(name.endswith(rule.ends) or re.match(rule.pattern, name) for name in names):
                return rule.scheme
        return self.scheme


def not_converted(names: Sequence[str]) -> tuple[Rule, ...]:
    """The rule for `modules_to_not_convert` as transformers takes it: beginnings or ends of names, or expressions."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return (Rule(rf"(?:{'|'.join(names)}){boundary}", None, tuple(names)),) if names else ()
