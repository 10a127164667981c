"""Completions that must match: schemas and regular expressions drawn at random, from checkpoints of random weights and
the default model, and what is asked for wrongly.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from eventlm.errors import InputError
from eventlm.offline import LLM, SamplingParams, StructuredOutputsParams
from eventlm.replay.execute.execution import execute
from eventlm.replay.verify.verifier import verify
from tests.checkpoints import make_checkpoint
from tests.grammars import is_prefix, random_regex, random_schema

TEMPERATURES = (0.0, 1.0, 1.5)
NUM_SCHEMAS, NUM_REGEXES = 300, 100
MAX_TOKENS = 400
PROMPT = "Here is what you asked for:"


def drawn(num_schemas: int, num_regexes: int, *, seed: int = 0) -> list[StructuredOutputsParams]:
    rng = random.Random(seed)
    structures = [StructuredOutputsParams(json=random_schema(rng)) for _ in range(num_schemas)]
    return structures + [StructuredOutputsParams(regex=random_regex(rng)) for _ in range(num_regexes)]


def params(structure: StructuredOutputsParams, temperature: float, index: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=index, max_tokens=MAX_TOKENS, structured_outputs=structure)


def check(text: str, finish_reason: str | None, structure: StructuredOutputsParams) -> None:
    """Whole where it ended by stop, else the beginning of something that would match."""
    if finish_reason == "stop" and structure.regex is not None:
        assert re.fullmatch(structure.regex, text), (structure.regex, text)
    elif finish_reason == "stop":
        jsonschema.Draft202012Validator(structure.json).validate(json.loads(text))
    else:
        assert finish_reason == "length"
        # What is left of a character that was cut off.
        assert is_prefix(structure.requested().grammar, text.rstrip("\ufffd").encode()), (structure, text)


def run(llm: LLM, structures: list[StructuredOutputsParams], temperatures: tuple[float, ...]) -> Counter[str]:
    """How they ended, checked."""
    asked = [(structure, temperature) for structure in structures for temperature in temperatures]
    each = [params(structure, temperature, index) for index, (structure, temperature) in enumerate(asked)]
    outputs = llm.generate([PROMPT] * len(asked), each, use_tqdm=False)
    ends: Counter[str] = Counter()
    for output, (structure, _) in zip(outputs, asked, strict=True):
        [completion] = output.outputs
        check(completion.text, completion.finish_reason, structure)
        ends[str(completion.finish_reason)] += 1
    return ends


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_another_tokenizer_is_what_a_structure_is_matched_by(tmp_path: Path) -> None:
    model, other = make_checkpoint(tmp_path / "model"), make_checkpoint(tmp_path / "other")
    (model / "tokenizer.json").unlink()
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    first, last = len(content["added_tokens"]), max(content["model"]["vocab"].values())
    content["model"]["vocab"] = {
        token: token_id if token_id < first else first + last - token_id
        for token, token_id in content["model"]["vocab"].items()
    }
    file.write_text(json.dumps(content))
    with LLM(model, tokenizer=other, record=tmp_path / "runs", record_tokens=True) as llm:
        ends = run(
            llm, [StructuredOutputsParams(regex="[0-9]{4}"), StructuredOutputsParams(regex="yes|no")], (0.0, 1.5)
        )
        folder = llm.run_folder
    assert ends == {"stop": 4}
    assert folder is not None
    again = execute(folder / "trace.jsonl", model=str(model))
    assert (again.exit_code, again.num_requests) == (0, 4)


def test_random_weights_match_whatever_they_are_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    with LLM(checkpoint, record=tmp_path, record_tokens=True) as llm:
        ends = run(llm, drawn(16, 8), (1.5,))
        folder = llm.run_folder
    assert ends["stop"] >= 0.95 * ends.total()
    assert folder is not None
    assert verify(folder / "trace.jsonl").divergence is None
    again = execute(folder / "trace.jsonl", model=str(checkpoint))
    assert (again.exit_code, again.num_requests) == (0, 24)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_structures_with_random_weights(checkpoint: Path, tmp_path: Path) -> None:
    with LLM(checkpoint, record=tmp_path, record_tokens=True) as llm:
        ends = run(llm, drawn(NUM_SCHEMAS, NUM_REGEXES), TEMPERATURES)
        folder = llm.run_folder
    print(f"random weights: {dict(ends)}")
    assert ends["stop"] >= 0.95 * ends.total()
    assert folder is not None
    assert execute(folder / "trace.jsonl", model=str(checkpoint), teacher_force=True).exit_code == 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_structures_with_the_default_model() -> None:
    with LLM(max_model_len=512) as llm:
        ends = run(llm, drawn(NUM_SCHEMAS, NUM_REGEXES), (1.0, 1.5))
    print(f"default model: {dict(ends)}")
    assert ends["stop"] >= 0.95 * ends.total()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "'regex' and 'choice'"),
        ({"regex": "(a"}, "unclosed group"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"choice": "yes"}, "choice"),
    ],
)
def test_errors_are_raised_before_anything_runs(llm: LLM, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**asked)), use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("fake") as llm:
        yield llm


def test_both_names_of_the_parameter_mean_the_same(llm: LLM) -> None:
    structure = StructuredOutputsParams(choice=["yes", "no"])
    texts = [
        llm.generate("x", SamplingParams(seed=1, **{name: structure}), use_tqdm=False)[0].outputs[0].text
        for name in ("structured_outputs", "guided_decoding")
    ]
    assert texts[0] == texts[1]
    assert texts[0] in ("yes", "no")
    with pytest.raises(InputError, match="guided_decoding"):
        SamplingParams(structured_outputs=structure, guided_decoding=structure)
