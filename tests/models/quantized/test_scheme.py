"""Which modules a method quantizes."""

from __future__ import annotations

import pytest

from eventlm.models.quantized.scheme import Method, Rule, Scheme, not_converted

SCHEME, OTHER = Scheme(layout="gptq", bits=4, group=(1, 128)), Scheme(layout="gptq", bits=8)


@pytest.mark.parametrize(
    ("pattern", "module", "is_quantized"),
    [
        ("lm_head", "lm_head", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", True),
        ("mlp.gate", "model.layers.1.mlp.gate", False),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", True),
        ("model.layers.[02].", "model.layers.2.mlp.up_proj", False),
        ("gate", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_modules_that_are_not_converted(pattern: str, module: str, *, is_quantized: bool) -> None:
    """As `should_convert_module` of transformers says."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = ["nothing", pattern]
    method = Method(name="", scheme=SCHEME, rules=not_converted(names))
    assert (method.scheme_of([module]) is not None) == is_quantized == should_convert_module(module, names)


def test_the_first_rule_that_matches_one_of_the_names_counts() -> None:
    method = Method(name="", scheme=None, rules=(Rule("a", OTHER), Rule("ab|c", SCHEME)))
    assert method.scheme_of(["x", "ab"]) == OTHER
    assert method.scheme_of(["x", "c"]) == SCHEME
    assert method.scheme_of(["bc"]) is None
    assert not_converted([]) == ()


@pytest.mark.parametrize(
    ("scheme", "num_in", "kind"),
    [
        (Scheme(layout="gptq", bits=4, group=(1, 128)), 256, "I4_128"),
        (Scheme(layout="awq", bits=4, group=(1, 64)), 256, "I4_32"),
        (Scheme(layout="packed", bits=8, group=(1, 0)), 288, "I8_128"),
        (Scheme(layout="bytes", group=(0, 0)), 288, "I8_128"),
        (Scheme(layout="fp4", bits=4, group=(1, 32)), 96, "MXFP4"),
        (Scheme(layout="fp8", group=(128, 128)), 288, "F8_128"),
        (Scheme(layout="fp8", group=(0, 0)), 288, "F8_128"),
        (Scheme(layout="fp8", group=(64, 64)), 256, ""),
        (Scheme(layout="gptq", bits=4, group=(1, 48)), 96, ""),
        (Scheme(layout="gptq", bits=4, group=(1, 0)), 100, ""),
        (Scheme(layout="gptq", bits=4, group=(1, 32), has_order=True), 96, ""),
    ],
)
def test_what_codes_can_be_multiplied(scheme: Scheme, num_in: int, kind: str) -> None:
    assert scheme.packed_type(num_in) == kind
