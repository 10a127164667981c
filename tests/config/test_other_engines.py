"""Names that options have in other engines."""

from __future__ import annotations

import re

from eventlm.config.options import options
from eventlm.config.other_engines import _TABLE as TABLE
from eventlm.config.other_engines import name_elsewhere


def test_the_table_speaks_of_options_that_there_are_and_of_none_by_its_own_name() -> None:
    named = {option for remark in TABLE.values() for option in re.findall(r"\{(\w+)\}", remark)}
    assert named <= set(options())
    assert set(TABLE) & set(options()) == set()


def test_a_name_is_found_however_it_is_written() -> None:
    for name in ("ssl_keyfile", "--ssl-keyfile", "--ssl_keyfile"):
        assert name_elsewhere(name, str) == "; its name here is tls_key"
    assert name_elsewhere("--enforce-eager", lambda name: options()[name].flag) == (
        "; --cuda-graphs turns CUDA graphs on and off"
    )
    assert name_elsewhere("-ctk", lambda name: options()[name].flag) == "; its name here is --kv-cache-dtype"
    assert name_elsewhere("-q", lambda name: options()[name].flag) == "; its name here is --quantization"
    assert name_elsewhere("prt", str) == ""
