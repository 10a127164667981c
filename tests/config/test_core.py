"""What the limits of the core come to for a replica of several stages, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.config import CoreConfig


def limits(**given: Any) -> CoreConfig:
    return CoreConfig(**({"models": ["m"], "num_blocks": 32, "max_model_len": 64, "max_num_seqs": 8} | given))


def test_one_stage_has_what_it_says() -> None:
    core = limits(max_steps_in_flight=5, max_decodes_in_flight_per_seq=3)
    assert (core.steps_in_flight, core.decodes_in_flight_per_seq, core.max_residents) == (5, 3, 8)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 16])
def test_a_pipeline_has_a_step_for_each_stage_and_one_more(max_steps_in_flight: int) -> None:
    core = limits(num_stages=3, max_steps_in_flight=max_steps_in_flight)
    assert (core.steps_in_flight, core.decodes_in_flight_per_seq, core.max_residents) == (4, 1, 24)
    assert limits(num_stages=3, micro_batches=4).max_residents == 32


def test_no_more_micro_batches_than_steps_in_flight() -> None:
    with pytest.raises(ValueError, match="micro_batches 4 are more than the 3 steps that 2 stages have in flight"):
        limits(num_stages=2, micro_batches=4)


def test_every_resident_has_a_state() -> None:
    assert limits(num_stages=2, state_slots=17)
    with pytest.raises(ValueError, match="16 is not more than max_num_seqs 8 in each of 2 micro-batches"):
        limits(num_stages=2, state_slots=16)
