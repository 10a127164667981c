"""Sizing the KV cache and the context that it allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eventlm.bootstrap import cache_plan, rank_parts
from eventlm.bootstrap.cache_plan import (
    FAKE_MAX_MODEL_LEN,
    FAKE_NUM_BLOCKS,
    CachePlan,
    check_kv_memory,
    memory_bytes,
    plan_cache,
    plan_states,
)
from eventlm.config import Config
from eventlm.config.core import MAX_BLOCKS
from eventlm.config.load import load_config
from eventlm.errors import UsageError
from eventlm.models.served import read_served
from eventlm.models.spec import ModelSpec
from tests.checkpoints import make_checkpoint

#: 2 (keys, values) x 2 layers x 2 heads x 8 x 4 bytes.
TOKEN_BYTES = 256
BLOCK_BYTES = 16 * TOKEN_BYTES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


#: In float32.
WEIGHT_BYTES = 4 * (2 * 100 * 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 32)
#: Cosines and sines of four pairs.
POSITION_BYTES = 4 * 2 * 4
#: Of a step of 512 tokens and 256 rows, the most that there are by default: each with its logits, the best of four
#: panels, and what one pass of its heads leaves.
ROW_BYTES = 4 * (100 + 2 * 4 + 4 * (8 + 2))
ACTIVATION_BYTES = 4 * 512 * (6 * 32 + (3 * 4 + 2) * 8 + 64) + 256 * ROW_BYTES
#: What a replica holds, whatever the context.
HELD_BYTES = WEIGHT_BYTES + ACTIVATION_BYTES


def config_with(**overrides: object) -> Config:
    return load_config(None, overrides, environment={})


def plan_in(config: Config, folder: Path, *, free: int | None = None, total: int | None = None) -> CachePlan:
    """The plan on a machine with so much memory free, and so much in all."""
    with machine(free, total):
        return plan_cache(config, folder)


def check_in(config: Config, *, total: int) -> None:
    with machine(None, total):
        check_kv_memory(config)


@contextmanager
def machine(free: int | None, total: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if free is not None:
            patch.setattr(cache_plan, "free_bytes", lambda: free)
        if total is not None:
            patch.setattr(cache_plan, "total_bytes", lambda: total)
        yield


def test_a_given_number_of_blocks_is_taken(checkpoint: Path) -> None:
    assert plan_cache(config_with(num_blocks=100), checkpoint) == (100, 512, [])


def test_blocks_fill_the_memory_that_is_given(checkpoint: Path) -> None:
    plan = plan_cache(config_with(kv_memory=f"{50 * BLOCK_BYTES}B"), checkpoint)
    assert (plan.num_blocks, plan.max_model_len) == (50, 512)
    assert plan_cache(config_with(kv_memory=f"{50 * BLOCK_BYTES}B", dtype="bfloat16"), checkpoint).num_blocks == 100


@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    [
        # A rank has one of the two KV heads, or one of the two layers.
        ({"tensor_parallel_size": 2}, 50),
        ({"pipeline_parallel_size": 2}, 50),
        # Each KV head is on two ranks, and each group has a pool of its own.
        ({"tensor_parallel_size": 4}, 25),
        ({"kv_parallel_size": 2}, 25),
    ],
)
def test_the_memory_is_that_of_all_ranks(checkpoint: Path, layout: dict[str, int], num_blocks: int) -> None:
    config = config_with(kv_memory=f"{50 * BLOCK_BYTES}B", **layout)
    assert plan_cache(config, checkpoint).num_blocks == num_blocks


def test_each_group_has_all_weights(checkpoint: Path) -> None:
    config = config_with(num_blocks=4, kv_parallel_size=2)
    exchanged = rank_parts.exchanged_bytes(config, read_served(checkpoint, "auto"))
    needed = 2 * (HELD_BYTES + 512 * POSITION_BYTES + 4 * BLOCK_BYTES) + exchanged
    assert plan_in(config, checkpoint, free=needed, total=1 << 40).warnings == plan_cache(config, checkpoint).warnings
    with pytest.raises(UsageError, match=f"its weights take {2 * WEIGHT_BYTES:,} bytes"):
        plan_in(config, checkpoint, free=HELD_BYTES, total=1 << 40)


def test_auto_is_a_quarter_of_what_is_left_shared_by_the_replicas_and_bounded(checkpoint: Path) -> None:
    tables = 512 * POSITION_BYTES
    left = 4 * (100 * BLOCK_BYTES + tables)
    assert plan_in(config_with(), checkpoint, free=left + HELD_BYTES).num_blocks == 100
    assert plan_in(config_with(), checkpoint, free=left + HELD_BYTES - 4).num_blocks == 99
    assert plan_in(config_with(replicas=2), checkpoint, free=2 * (left + HELD_BYTES)).num_blocks == 100
    assert plan_in(config_with(), checkpoint, free=1 << 60).num_blocks == ((4 << 30) - tables) // BLOCK_BYTES
    assert plan_cache(config_with(), checkpoint).num_blocks > 0


@pytest.mark.parametrize("position_bytes", [POSITION_BYTES, 1 << 20])
def test_auto_gives_way_to_the_rotary_tables_of_its_context(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, position_bytes: int
) -> None:
    monkeypatch.setattr(cache_plan, "rope_bytes", lambda model, dtype, is_on_gpu: position_bytes)
    free = HELD_BYTES + 4 * 11 * (BLOCK_BYTES + 16 * position_bytes)
    plan = plan_in(config_with(), checkpoint, free=free)
    assert (plan.num_blocks, plan.max_model_len) == (11, 160)
    assert plan_in(config_with(), checkpoint, free=free - 4).num_blocks == 10
    # Tables of a context that is asked for are all counted.
    num_bytes = 12 * BLOCK_BYTES + 161 * position_bytes
    assert plan_in(config_with(max_model_len=161), checkpoint, free=HELD_BYTES + 4 * num_bytes).num_blocks == 12
    tables = "of 4,096 bytes for each replica beside .* of rotary tables; give --kv-memory "
    with pytest.raises(UsageError, match=f"a context of 161 tokens needs 12 KV blocks {tables}"):
        plan_in(config_with(max_model_len=161), checkpoint, free=HELD_BYTES + 4 * num_bytes - 4)


def test_the_rotary_tables_of_the_context_must_fit_beside_a_cache_that_is_given(checkpoint: Path) -> None:
    least = HELD_BYTES + 512 * POSITION_BYTES + 2 * BLOCK_BYTES
    given = config_with(kv_memory="1MiB")
    assert plan_in(given, checkpoint, free=least).max_model_len == 512
    with pytest.raises(
        UsageError, match=r"activations 905,216 bytes, rotary tables 16,384 bytes.*; lower .*lower --max-model-"
    ):
        plan_in(given, checkpoint, free=least - 1)
    assert plan_in(config_with(kv_memory="1MiB", max_model_len=16), checkpoint, free=least - 1).max_model_len == 16


def test_the_context_is_cut_to_one_block_less_than_the_pool_with_a_warning(checkpoint: Path) -> None:
    plan = plan_cache(config_with(num_blocks=11), checkpoint)
    assert plan.max_model_len == 160
    assert "cut from 512 to 160 tokens" in plan.warnings[0]
    assert plan.warnings[0].endswith("; raise --num-blocks for more")
    [warning] = plan_cache(config_with(kv_memory=f"{11 * BLOCK_BYTES}B"), checkpoint).warnings
    assert warning.endswith("; raise --kv-memory for more")
    assert plan_cache(config_with(num_blocks=11, max_model_len=160), checkpoint) == (11, 160, [])


def test_linear_scaling_stretches_the_context(tmp_path: Path) -> None:
    stretched = make_checkpoint(tmp_path / "linear", rope="linear")
    assert plan_cache(config_with(kv_memory="64MiB"), stretched).max_model_len == 4 * 512
    assert plan_cache(config_with(kv_memory="64MiB", max_model_len=2048), stretched).max_model_len == 2048
    with pytest.raises(UsageError, match="--max-model-len 2049 is longer than the 2048 tokens that the model was made"):
        plan_cache(config_with(max_model_len=2049), stretched)
    kept = make_checkpoint(tmp_path / "llama3", rope="llama3")
    assert plan_cache(config_with(kv_memory="64MiB"), kept).max_model_len == 512


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"num_blocks": 11, "max_model_len": 161},
            "a context of 161 tokens needs 12 of 16 tokens, there are 11; raise --num-blocks, or",
        ),
        ({"num_blocks": 1}, "even the shortest context needs 2 of 16 tokens, there are 1; raise --num-blocks"),
        (
            {"kv_memory": "1KiB"},
            "--kv-memory 1KiB is too little: even the shortest context needs 2 KV blocks of 4,096 bytes for each "
            "replica; give --kv-memory 8KiB or more",
        ),
        ({"kv_memory": "8KiB", "max_model_len": 17}, "needs 3 KV blocks .* give --kv-memory 12KiB or more, or lower"),
        ({"max_model_len": 513}, "--max-model-len 513 is longer than the 512 tokens that the model was made for"),
    ],
)
def test_a_context_that_cannot_be_had_is_an_error(checkpoint: Path, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_cache(config_with(**overrides), checkpoint)


def test_weights_and_one_sequence_must_fit_into_memory(checkpoint: Path) -> None:
    least = HELD_BYTES + 16 * POSITION_BYTES + 2 * BLOCK_BYTES
    assert plan_in(config_with(num_blocks=2), checkpoint, free=least).num_blocks == 2
    with pytest.raises(UsageError) as raised:
        plan_in(config_with(num_blocks=2), checkpoint, free=least - 1)
    assert str(raised.value) == (
        f"{checkpoint}: its weights take {WEIGHT_BYTES:,} bytes, activations 905,216 bytes, rotary tables 512 bytes, "
        f"the KV cache of one sequence 8,192 bytes, and {least - 1:,} bytes of memory are free; lower --max-num-seqs, "
        "take a smaller model, or end other programs"
    )
    with pytest.raises(UsageError, match=r"for each of 2 replicas, .*; lower --replicas, lower --max-num-seqs, take"):
        plan_in(config_with(num_blocks=2, replicas=2), checkpoint, free=2 * least - 1)
    with pytest.raises(UsageError, match=r"one sequence 135,168 bytes.*, lower --max-model-len, take"):
        plan_in(config_with(max_model_len=512), checkpoint, free=least)
    with pytest.raises(
        UsageError, match=r"activations 3 MiB, .*; lower --max-num-batched-tokens, lower --max-num-seqs"
    ):
        plan_in(config_with(num_blocks=2, max_num_batched_tokens=2048), checkpoint, free=least)
    fewer = least - 128 * ROW_BYTES
    assert plan_in(config_with(num_blocks=2, max_num_seqs=128), checkpoint, free=fewer).num_blocks == 2
    with pytest.raises(UsageError, match=r"activations 829,440 bytes"):
        plan_in(config_with(num_blocks=2, max_num_seqs=128), checkpoint, free=fewer - 1)


@pytest.mark.parametrize(
    ("overrides", "num_passes"),
    [
        ({"num_blocks": 2}, 1),
        ({"num_blocks": 129}, 3),
        ({"num_blocks": 129, "max_model_len": 1024}, 1),
        ({"kv_memory": f"{65 * BLOCK_BYTES}B"}, 2),
        ({"kv_memory": "1GiB"}, 4),
    ],
)
def test_activations_are_of_the_context_that_the_cache_can_hold(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, object], num_passes: int
) -> None:
    monkeypatch.setattr(cache_plan, "rope_bytes", lambda model, dtype, is_on_gpu: 0)
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (checkpoint / "config.json").write_text(json.dumps(config))
    least = HELD_BYTES + (num_passes - 1) * 256 * 4 * 4 * (8 + 2)
    least += BLOCK_BYTES * (65 if "max_model_len" in overrides else 2)
    assert plan_in(config_with(**overrides), checkpoint, free=least).num_blocks >= 2
    with pytest.raises(UsageError, match="activations "):
        plan_in(config_with(**overrides), checkpoint, free=least - 1)


def test_int8_weights_fit_where_others_do_not(checkpoint: Path) -> None:
    """Of 32 and 64 inputs, the fewer padded."""
    matrices = 100 * (64 + 4) + 2 * ((2 * 32 + 2 * 16 + 2 * 64) * (64 + 4) + 32 * (64 + 4))
    floats = 2 * (100 * 32 + 2 * 2 * 32 + 32)
    least = matrices + floats + ACTIVATION_BYTES + 16 * POSITION_BYTES + 2 * BLOCK_BYTES // 2
    options = {"num_blocks": 2, "quantization": "int8"}
    assert plan_in(config_with(**options), checkpoint, free=least).num_blocks == 2
    with pytest.raises(UsageError, match=f"its weights take {matrices + floats:,} bytes"):
        plan_in(config_with(**options), checkpoint, free=least - 1)
    assert matrices + floats < WEIGHT_BYTES


def test_a_cache_that_memory_may_not_hold_is_warned_of(checkpoint: Path) -> None:
    free = HELD_BYTES + 512 * POSITION_BYTES + 40 * BLOCK_BYTES
    assert plan_in(config_with(num_blocks=40), checkpoint, free=free).warnings == []
    [warning] = plan_in(config_with(num_blocks=41), checkpoint, free=free).warnings
    assert "may grow to 167,936 bytes, and weights, activations and rotary tables leave 163,840 bytes of" in warning


def test_a_cache_that_all_of_memory_does_not_hold_is_an_error(checkpoint: Path) -> None:
    check_in(config_with(kv_memory="4GiB", replicas=2), total=8 << 30)
    check_in(config_with(kv_memory="auto"), total=1)
    check_in(config_with(kv_memory="1TiB", model="fake"), total=1)
    with pytest.raises(UsageError) as raised:
        check_in(config_with(kv_memory="5GiB", replicas=2), total=8 << 30)
    assert str(raised.value) == (
        "--kv-memory 5GiB: KV caches of 10,240 MiB for 2 replicas (5,120 MiB each) are more than all the memory here, "
        "which is 8,192 MiB; give less, or leave it out for what fits"
    )
    of_blocks = config_with(num_blocks=41, kv_memory="1TiB")
    check_in(of_blocks, total=1)
    assert plan_in(of_blocks, checkpoint, total=41 * BLOCK_BYTES).num_blocks == 41
    with pytest.raises(UsageError, match=r"--num-blocks 41: a KV cache of 167,936 bytes is more than all the memory"):
        plan_in(of_blocks, checkpoint, total=41 * BLOCK_BYTES - 1)


def test_the_fake_model_has_a_pool_of_its_own() -> None:
    config = config_with(model="fake")
    assert plan_cache(config, None) == (FAKE_NUM_BLOCKS, FAKE_MAX_MODEL_LEN, [])
    assert plan_cache(config_with(model="fake", max_model_len=20_000), None).max_model_len == 20_000


def test_no_more_blocks_than_an_engine_can_have(checkpoint: Path) -> None:
    much = (MAX_BLOCKS + 5) * BLOCK_BYTES
    plan = plan_in(config_with(kv_memory=f"{much}B"), checkpoint, free=2 * much, total=2 * much)
    assert plan.num_blocks == MAX_BLOCKS
    assert plan.warnings == [
        f"there is memory for {MAX_BLOCKS + 5:,} KV blocks of each replica, and an engine can have at most "
        f"{MAX_BLOCKS:,}: the rest stays free; raise --block-size to use it"
    ]
    of_two = config_with(kv_memory=f"{much}B", replicas=2)
    assert plan_in(of_two, checkpoint, free=4 * much, total=4 * much).num_blocks == MAX_BLOCKS // 2
    fake = config_with(model="fake", num_blocks=MAX_BLOCKS)
    assert plan_cache(fake, None).num_blocks == MAX_BLOCKS
    with pytest.raises(
        UsageError, match=r"--num-blocks 8388609: an engine can have at most 8,388,608 for each of 2 re"
    ):
        plan_cache(config_with(model="fake", num_blocks=MAX_BLOCKS // 2 + 1, replicas=2), None)
    of_groups = {"model": "fake", "replicas": 2, "kv_parallel_size": 4}
    assert plan_cache(config_with(num_blocks=MAX_BLOCKS // 8, **of_groups), None).num_blocks == MAX_BLOCKS // 8
    with pytest.raises(UsageError, match="at most 2,097,152 for each of 8 KV groups; lower it"):
        plan_cache(config_with(num_blocks=MAX_BLOCKS // 8 + 1, **of_groups), None)
    with pytest.raises(UsageError, match="--num-blocks 16777217: must be an integer from 0 to 16777216"):
        config_with(model="fake", num_blocks=MAX_BLOCKS + 1)


def test_a_smaller_type_has_more_blocks(checkpoint: Path) -> None:
    """A token has 8 heads of 8 elements, of 4 or 2 bytes, or of one with 4 more for their scale."""
    blocks = {
        kv_cache_dtype: plan_cache(config_with(kv_memory="1MiB", kv_cache_dtype=kv_cache_dtype), checkpoint).num_blocks
        for kv_cache_dtype in ("auto", "bfloat16", "int8", "fp8")
    }
    assert blocks == {"auto": 256, "bfloat16": 512, "int8": 682, "fp8": 682}


def test_heads_that_a_scale_does_not_fit_beside_are_an_error(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"head_dim": 6}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="--kv-cache-dtype int8 needs heads of a multiple of 4, this model's have 6"):
        plan_cache(config_with(num_blocks=100, kv_cache_dtype="int8"), checkpoint)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("7B", 7), ("2KB", 2000), ("2KiB", 2048), ("1.5GiB", 3 << 29), ("3TB", 3 * 10**12), ("1TiB", 1 << 40)],
)
def test_sizes_have_decimal_and_binary_units(size: str, expected: int) -> None:
    assert memory_bytes(size) == expected
    assert config_with(kv_memory=size).cache.kv_memory == size


@pytest.mark.parametrize("overrides", [{}, {"max_model_len": 17}, {"max_model_len": 500}])
def test_the_memory_that_an_error_asks_for_is_enough(checkpoint: Path, overrides: dict[str, object]) -> None:
    with pytest.raises(UsageError) as raised:
        plan_cache(config_with(kv_memory="1KiB", **overrides), checkpoint)
    size = str(raised.value).partition("give --kv-memory ")[2].split()[0]
    assert plan_cache(config_with(kv_memory=size, **overrides), checkpoint).num_blocks >= 2


STATE_BYTES = 100 * 1024


@pytest.fixture
def recurrent(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint as if it had recurrent layers."""
    monkeypatch.setattr(cache_plan, "state_bytes", lambda model: STATE_BYTES)
    return checkpoint


def test_a_recurrent_model_has_two_slots_for_every_sequence_out_of_the_cache_s_memory(recurrent: Path) -> None:
    given = config_with(max_num_seqs=4, kv_memory="2MiB")
    config, warnings = plan_states(given, recurrent)
    assert (config.cache.state_slots, config.scheduler.max_num_seqs, warnings) == (8, 4, [])
    num_blocks = ((2 << 20) - 8 * STATE_BYTES) // BLOCK_BYTES
    assert plan_in(config, recurrent, free=1 << 30) == (num_blocks, 512, [])
    # With a number of blocks the slots come on top.
    config, _ = plan_states(config_with(max_num_seqs=4, num_blocks=100, kv_memory="2MiB"), recurrent)
    assert plan_in(config, recurrent, free=1 << 30).num_blocks == 100


def test_fewer_sequences_run_where_half_of_the_memory_does_not_hold_their_states(recurrent: Path) -> None:
    config, (warning,) = plan_states(config_with(kv_memory="2MiB"), recurrent)
    assert (config.cache.state_slots, config.scheduler.max_num_seqs) == (10, 7)
    assert "lowered from 256 to 7" in warning
    with machine((1 << 23) + HELD_BYTES, None):
        assert plan_states(config_with(), recurrent)[0] == config_with(state_slots=10, max_num_seqs=7)


def test_slots_that_do_not_fit_are_refused_with_figures(recurrent: Path, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="give --kv-memory 400KiB"):
        plan_states(config_with(kv_memory="300KiB"), recurrent)
    with pytest.raises(UsageError, match="--state-slots 4 is not more than --max-num-seqs 4"):
        plan_states(config_with(state_slots=4, max_num_seqs=4), recurrent)
    with pytest.raises(UsageError, match="--max-num-batched-tokens 8 is less than --block-size 16"):
        plan_states(config_with(max_num_seqs=4, max_num_batched_tokens=8), recurrent)
    config, _ = plan_states(config_with(state_slots=12, max_num_seqs=4, kv_memory="1MiB"), recurrent)
    with pytest.raises(UsageError, match=r"needs 2 KV blocks .* beside 1 MiB of states; give --kv-memory 1208KiB"):
        plan_in(config, recurrent, free=1 << 30)
    with pytest.raises(UsageError, match="the states of 12 slots 1 MiB, and"):
        plan_in(config, recurrent, free=1 << 20)


def test_other_models_have_no_slots(checkpoint: Path) -> None:
    assert plan_states(config_with(), checkpoint) == (config_with(), [])
    with pytest.raises(UsageError, match="--state-slots 9 is for a model with recurrent layers, and smollm2 has none"):
        plan_states(config_with(state_slots=9), checkpoint)


def test_the_fake_model_has_slots_if_it_is_asked_for_recurrent_layers() -> None:
    config, _ = plan_states(config_with(model="fake", fake={"recurrent": True}, max_num_seqs=3), None)
    assert config.cache.state_slots == 6
    assert plan_states(config_with(model="fake"), None)[0].cache.state_slots == 0


def test_all_ranks_of_a_replica_are_counted(checkpoint: Path) -> None:
    """Two share the key heads, each of four has one of them."""
    for tensor, per_token in ((2, 1), (4, 2)):
        config = config_with(kv_memory=f"{64 * BLOCK_BYTES}B", tensor_parallel_size=tensor)
        assert plan_in(config, checkpoint).num_blocks == 64 // per_token
    staged = config_with(kv_memory=f"{64 * BLOCK_BYTES}B", pipeline_parallel_size=2)
    assert plan_in(staged, checkpoint).num_blocks == 64


def test_weights_that_all_ranks_have_are_counted_for_each(checkpoint: Path) -> None:
    config = config_with(tensor_parallel_size=2, kv_memory="1MB")
    # Norms; activations that do not become smaller with the rank's share.
    with pytest.raises(UsageError, match="its weights take"):
        plan_in(config, checkpoint, free=HELD_BYTES + 16 * BLOCK_BYTES)
    assert plan_in(config, checkpoint, free=2 * HELD_BYTES + (2 << 20)).num_blocks


def test_what_ranks_exchange_is_counted(checkpoint: Path) -> None:
    """Of each of two tensor ranks twice, between two stages three times: the streams of a step of 512 tokens."""
    stream = 4 * 512 * 32
    for ranks, num_streams in (({"tensor_parallel_size": 2}, 4), ({"pipeline_parallel_size": 2}, 3)):
        config = config_with(num_blocks=8, **ranks)
        sizes = cache_plan._sizes(config, read_served(checkpoint, "auto"), {})
        parts = rank_parts.parts_of(config, read_served(checkpoint, "auto"), {})
        alone = sum(cache_plan._activation_bytes(config, part.model, sizes.block) for part in parts)
        assert sizes.activations - alone == num_streams * stream


def test_what_kv_groups_exchange_is_counted(checkpoint: Path) -> None:
    """Of each of three groups twice: maximum, sum and output of each head, as each may share all tokens of its step."""
    config, decoder = config_with(num_blocks=8, kv_parallel_size=3), read_served(checkpoint, "auto")
    assert isinstance(decoder, ModelSpec)
    numbers = decoder.num_heads * (decoder.head_dim + 2)
    assert rank_parts.exchanged_bytes(config, decoder) == 2 * 3 * (3 * 512 // 2) * numbers * 4


def test_what_a_model_cannot_be_split_into_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="4 query heads cannot be dealt out to 5 tensor ranks"):
        plan_in(config_with(tensor_parallel_size=5), checkpoint)
    with pytest.raises(UsageError, match="a model of 2 layers cannot have 3 stages"):
        plan_in(config_with(pipeline_parallel_size=3), checkpoint)
