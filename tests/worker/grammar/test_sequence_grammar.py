"""What may follow in a grammar, beside everything else that has a say in what is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.sampling_params import SamplingParams
from eventlm.text.grammar import choice_grammar, lark_grammar, regex_grammar
from eventlm.text.tokenizer import CheckpointTokenizer
from eventlm.types import WorkerEnd
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import StepPayload
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.reference import make_runner

PROMPT = [10, 20, 30]
BLOCKS = [(0, 0, list(range(40)))]


class Setting:
    """A random-weight checkpoint: what it draws under some parameters."""

    def __init__(self, folder: Path) -> None:
        self.runner = make_runner(make_checkpoint(folder))
        self.tokenizer = CheckpointTokenizer(folder)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, token_ids: list[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, token_ids)).decode()

    def draw(self, grammar: str, *, output: tuple[int, ...] = (), most: int = 40, **params: Any) -> tuple[str, Any]:
        """The whole text and the end (None: still going on); `output` is what the sequence has already."""
        fields = {"temperature": 1.5, "eos_token_ids": (EOS_ID,), "seed": 3, "max_tokens": 100} | params
        new = new_sequence(
            1,
            [*PROMPT, *output],
            num_prompt_tokens=len(PROMPT),
            params=SamplingParams(grammar=grammar, **fields),
        )
        tokens = list(output)
        ends: list[tuple[int, WorkerEnd]] = []
        try:
            for step in range(most):
                length = len(PROMPT) + len(tokens)
                if step:
                    launch, beside = launched(step, decodes=[(1, 0, length, 0)]), StepPayload()
                else:
                    launch, beside = launched(0, chunks=[(1, 0, 0, length, 1)], blocks=BLOCKS), payload(new)
                result = self.runner.execute(launch, beside)
                tokens += result.tokens[0]
                if result.ends:
                    ends = result.ends
                    break
        finally:
            self.runner.execute(launched(99, forget=[(1, 0)]), StepPayload())
        return self.text(tokens), ends[0][1] if ends else None


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("greedy", [True, False])
def test_the_end_of_the_grammar_is_the_end_of_the_output(setting: Setting, greedy: bool) -> None:
    found = setting.draw(choice_grammar(["yes!", "no!"], "p"), temperature=0.0 if greedy else 1.5)
    assert found in {("yes!", "grammar"), ("no!", "grammar")}


def test_where_the_text_may_end_an_end_token_may_be_drawn(setting: Setting) -> None:
    biased = setting.draw(regex_grammar("a{2,9}", "p"), logit_bias={EOS_ID: 100.0})
    assert biased == ("aa", "eos")


def test_an_ignored_end_goes_on_for_as_long_as_the_grammar_allows_more(setting: Setting) -> None:
    assert setting.draw(regex_grammar("a{2,9}", "p"), ignore_eos=True) == ("a" * 9, "grammar")
    # The end is seen one token later where the longest text may go on by its beginning.
    text, end = setting.draw(lark_grammar('start: "a" ("b" | "bc")', "p"), ignore_eos=True)
    assert (text in ("ab", "abc"), end) == (True, "grammar")


def test_a_stop_token_may_be_drawn_only_where_the_text_may_end(setting: Setting) -> None:
    [stop] = setting.ids("!")
    biased = {"logit_bias": {stop: 100.0}, "stop_token_ids": (stop,), "ignore_eos": True}
    assert setting.draw(regex_grammar("a{3}b{0,9}", "p"), **biased) == ("aaa!", "stop_token")
    # Unless the grammar has nothing else.
    assert setting.draw(regex_grammar("a!b", "p"), **biased) == ("a!", "stop_token")


def test_min_tokens_hold_as_long_as_the_grammar_has_something_to_draw(setting: Setting) -> None:
    biased = {"logit_bias": {EOS_ID: 100.0}, "min_tokens": 5}
    [one] = setting.ids("a")
    only = {"allowed_token_ids": (one, EOS_ID)}
    assert setting.draw(regex_grammar("a{2,9}", "p"), **biased, **only) == ("a" * 5, "eos")
    assert setting.draw(regex_grammar("a{2,3}", "p"), **biased, **only) == ("a" * 3, "grammar")


def test_allowed_ids_and_bad_words_hold_where_they_leave_something(setting: Setting) -> None:
    [a], [b], [x] = setting.ids("a"), setting.ids("b"), setting.ids("x")
    grammar = regex_grammar("[abc]{4}", "p")
    assert setting.draw(grammar, allowed_token_ids=(b,)) == ("bbbb", "grammar")
    assert set(setting.draw(grammar, allowed_token_ids=(x,))[0]) <= set("abc")
    assert "a" not in setting.draw(grammar, bad_words_token_ids=((a,),))[0]
    assert setting.draw(regex_grammar("a{3}", "p"), bad_words_token_ids=((a,),))[0] == "aaa"


def test_a_grammar_may_name_special_tokens(setting: Setting) -> None:
    [name] = [text for token, text in setting.tokenizer.special_bytes.items() if token == EOS_ID]
    text, end = setting.draw(lark_grammar(f'start: "a" {name.decode()}', "p"))
    assert (text, end) == ("a", "eos")


def test_a_history_is_followed_before_the_next_token(setting: Setting) -> None:
    grammar = lark_grammar('start: "x" a | "y" b\na: /[0-4]{6}/\nb: /[5-9]{6}/', "p")
    text, end = setting.draw(grammar, output=setting.ids("y56"))
    assert (text[:3], end, len(text)) == ("y56", "grammar", 7)
    whole, _ = setting.draw(grammar, temperature=0.0)
    for length in range(1, 6):
        again, _ = setting.draw(grammar, temperature=0.0, output=setting.ids(whole[:1]) if length == 1 else ())
        assert again == whole


def test_a_grammar_that_a_history_does_not_match_ends_with_an_error(setting: Setting) -> None:
    assert setting.draw(regex_grammar("ab", "p"), output=setting.ids("z"))[1] == "error"


def test_a_grammar_that_cannot_be_built_ends_only_its_own_sequence(setting: Setting) -> None:
    assert setting.draw(regex_grammar("(a", "p"))[1] == "error"
    assert setting.draw(choice_grammar(["ok"], "p")) == ("ok", "grammar")


def test_steps_in_flight_after_an_end_do_no_harm(setting: Setting) -> None:
    """Launched before the end was known; the engine drops what they give."""
    runner: ModelRunner = setting.runner
    params = SamplingParams(grammar=choice_grammar(["a"], "p"), eos_token_ids=(EOS_ID,), temperature=0.0)
    first = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=BLOCKS)
    assert runner.execute(first, payload(new_sequence(1, PROMPT, params=params))).ends == [(0, "grammar")]
    for step in (1, 2):
        behind = runner.execute(launched(step, decodes=[(1, 0, 4, step - 1)]), StepPayload())
        assert (behind.tokens, behind.ends) == ([[EOS_ID]], [(0, "eos")])
    runner.execute(launched(9, forget=[(1, 0)]), StepPayload())


def test_rows_with_and_without_a_grammar_share_a_step(setting: Setting) -> None:
    """Each draws what it draws alone."""
    grammars = [choice_grammar(["red", "green"], "p"), "", regex_grammar("[a-f]{8}", "p")]
    alone = [setting.draw(grammar, most=4, temperature=1.0)[0] for grammar in grammars]
    chunks, blocks, new = [], [], []
    for number, grammar in enumerate(grammars):
        params = SamplingParams(temperature=1.0, seed=3, grammar=grammar, eos_token_ids=(EOS_ID,))
        new.append(new_sequence(number, PROMPT, params=params))
        chunks.append((number, 0, 0, 3, 1))
        blocks.append((number, 0, list(range(10 * number, 10 * number + 10))))
    tokens = [
        list(each) for each in setting.runner.execute(launched(0, chunks=chunks, blocks=blocks), payload(*new)).tokens
    ]
    for step in range(1, 4):
        decodes = [(number, 0, 3 + step, 0) for number in range(3)]
        for mine, drawn in zip(
            tokens, setting.runner.execute(launched(step, decodes=decodes), StepPayload()).tokens, strict=True
        ):
            mine += drawn
    setting.runner.execute(launched(9, forget=[(number, 0) for number in range(3)]), StepPayload())
    for mine, text in zip(tokens, alone, strict=True):
        assert (
            b"".join(map(setting.tokenizer.token_bytes, mine))
            .decode(errors="replace")
            .startswith(text.rstrip("\ufffd"))
        )


def test_what_is_forced_is_followed_and_what_is_drawn_is_answered(setting: Setting) -> None:
    grammar = lark_grammar('start: "x" /[0-4]{3}/ | "y" /[5-9]{3}/', "p")
    params = SamplingParams(temperature=1.0, seed=3, grammar=grammar, eos_token_ids=(EOS_ID,))
    forced = [*setting.ids("x"), *setting.ids("1"), *setting.ids("2"), *setting.ids("3")]
    drawn: list[int] = []
    ends = []
    for step, token_id in enumerate(forced):
        if step:
            launch, new = launched(step, decodes=[(1, 0, 3 + step, 0)]), []
        else:
            launch = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=BLOCKS)
            new = [new_sequence(1, PROMPT, params=params)]
        result = setting.runner.execute(launch, StepPayload(new=new, forced=[[token_id]]))
        drawn += result.tokens[0]
        ends += result.ends
    setting.runner.execute(launched(9, forget=[(1, 0)]), StepPayload())
    assert set(setting.text(drawn)[1:]) <= set("01234")
    assert ends == [(0, "grammar")]
