"""`LLM` in this process: what it returns, what it refuses, and that it has vLLM's face."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tqdm

from eventlm import LLM, RequestOutput, SamplingParams
from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import CheckpointError, InputError, UsageError
from eventlm.events import Arrived, Cancelled
from tests.engine.engines import expected_tokens
from tests.processes import PATIENCE_SECONDS, is_running
from tests.serving import fake_text, verified

#: Short steps: what the fake worker says does not depend on how long it takes.
FAKE = {"base_ns": 200_000, "prefill_token_ns": 0, "decode_ns": 0, "context_token_ns": 0}
#: A call of many such steps is under way for long enough to have something done to it.
SLOW = FAKE | {"base_ns": 20_000_000}
USER = [{"role": "user", "content": "a"}]
REFUSED = "Invalid value for 'messages': the chat template cannot render"
quiet = functools.partial(LLM.generate, use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake", fake=FAKE, max_model_len=256) as llm:
        yield llm


def seeded(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 5, "max_tokens": 12} | changes))


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    params = [seeded(seed=number, max_tokens=40 - number) for number in range(20)]
    outputs = quiet(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for number, output in enumerate(outputs):
        [completion] = output.outputs
        assert completion.text == fake_text(number, 40 - number)
        assert completion.token_ids == expected_tokens(number, 0, 40 - number)
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert output.prompt_token_ids == [256, *prompts[number].encode()]
        assert (output.finished, output.prompt_logprobs, completion.logprobs) == (True, None, None)
        assert completion.cumulative_logprob is None
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + 20))


def test_prompts_in_all_their_forms(llm: LLM) -> None:
    ids = [256, 72, 105]
    forms: list[Any] = [
        "Hi",
        ids,
        ["Hi"],
        [ids],
        {"prompt": "Hi"},
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids, "prompt": "Hi"}],
        ("Hi",),
    ]
    outputs = [quiet(llm, form, seeded()) for form in forms]
    assert [[each.prompt_token_ids for each in output] for output in outputs] == [[ids]] * len(forms)
    assert [output[0].prompt for output in outputs] == ["Hi", None, "Hi", None, "Hi", None, "Hi", "Hi"]
    assert quiet(llm, []) == []


def test_several_completions_of_a_prompt(llm: LLM) -> None:
    [output] = quiet(llm, "Hi", seeded(n=3))
    assert [completion.token_ids for completion in output.outputs] == [expected_tokens(5, i, 12) for i in range(3)]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string(llm: LLM, include: bool) -> None:
    whole = fake_text(5, 60)
    stop = whole[30:36]
    [output] = quiet(llm, "Hi", seeded(max_tokens=60, stop=["nowhere", stop], include_stop_str_in_output=include))
    [completion] = output.outputs
    assert completion.text == whole[: whole.index(stop) + (len(stop) if include else 0)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_token(llm: LLM) -> None:
    tokens = expected_tokens(5, 0, 20)
    [output] = quiet(llm, "Hi", seeded(stop_token_ids=[tokens[6]], max_tokens=20))
    [completion] = output.outputs
    position = tokens.index(tokens[6]) + 1
    assert completion.token_ids == tokens[:position]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[6])


def test_max_tokens_up_to_the_context(llm: LLM) -> None:
    [output] = quiet(llm, [1] * 200, seeded(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 56


def test_default_parameters(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    [output] = quiet(llm, "Hi")
    assert len(output.outputs[0].token_ids) == 16


def test_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    one = llm.chat(messages, seeded(), use_tqdm=False)
    both = llm.chat([messages, messages[1:]], seeded(), False)
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [output.prompt for output in one] == [rendered]
    assert [output.prompt for output in both] == [rendered, rendered[rendered.index("<|im_start|>user") :]]
    assert one[0].prompt_token_ids[0] == 258


def test_chat_goes_on_with_the_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "use_tqdm": False}
    [closed] = llm.chat(messages, seeded(), **options)
    [open_] = llm.chat(messages, seeded(), continue_final_message=True, **options)
    assert closed.prompt is not None
    assert closed.prompt == (open_.prompt or "") + "<|im_end|>\n"
    [other] = llm.chat(messages, seeded(), chat_template="{{ messages[0].content }}!{{ mood }}", use_tqdm=False,
                       chat_template_kwargs={"mood": "?"})  # fmt: skip
    assert other.prompt == "Hi!?"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["Hi", [1] * 250], seeded(), "This model's maximum context length is 256 tokens. However, you requested 262 "
         "tokens (250 in prompts[1], 12 in the completion). Please reduce the length of prompts[1] or the completion."),
        ([1] * 256, seeded(max_tokens=None), "This model's maximum context length is 256 tokens. However, you "
         "requested 257 tokens (256 in the prompt, 1 in the completion)"),
        (["Hi", [], "Ho"], None, "Invalid value for 'prompts[1]': it is empty."),
        (["Hi", [3, 1024]], None, "Invalid value for 'prompts[1][1]': token id 1024 is out of vocabulary"),
        (["Hi", [3, "x"]], None, "Invalid type for 'prompts[1][1]': expected an integer."),
        (["Hi", 3], None, "prompts[1] must be a text, a list of token ids or a dict, got int"),
        (["Hi", None], None, "prompts[1] must be a text, a list of token ids or a dict, got NoneType"),
        (7, None, "prompts must be a text, token ids, a dict or a list of these, got int"),
        (b"Hi", None, "prompts must be a text, token ids, a dict or a list of these, got bytes"),
        ({"promt": "Hi"}, None, "prompt has the key 'promt'; known: cache_salt, prompt, prompt_token_ids"),
        ({}, None, "prompt has neither 'prompt' nor 'prompt_token_ids'"),
        ([{"prompt_token_ids": "Hi"}], None, "prompts[0].prompt_token_ids must be a list of token ids, got str"),
        ("\ud800", None, "prompt is not valid text: it has a lone surrogate at 0"),
        (["a", "b"], [SamplingParams()], "there are 2 prompts, but 1 sampling_params"),
        ("a", {"temperature": 0}, "sampling_params must be a SamplingParams or a list of them"),
        ("a", seeded(stop_token_ids=[1024]), "Invalid value for 'stop_token_ids[0]': token id 1024 is out of"),
        ("a", seeded(allowed_token_ids=[5, 2000]), "Invalid value for 'allowed_token_ids[1]': token id 2000 is"),
        ("a", seeded(logit_bias={1024: 1}), "Invalid value for 'logit_bias.1024': token id 1024 is out of vocabulary"),
        ("a", SamplingParams(n=2, temperature=0), "n is 2 at temperature 0"),
        ("a", seeded(bad_words=[" "]), "Invalid value for 'bad_words[0]': it has nothing but spaces."),
    ],
)  # fmt: skip
def test_a_bad_prompt_is_found_before_anything_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("messages", "changes", "message"),
    [
        ("Hi", {}, "messages must be a list of messages or of conversations, got str"),
        ([[{"role": "user", "content": "a"}], []], {}, "messages[1]: Invalid value for 'messages'"),
        ([{"role": "big boss", "content": "a"}], {}, "Invalid value for 'messages[0].role'"),
        ([{"content": "a"}], {}, "Missing required parameter: 'messages[0].role'."),
        (USER, {"chat_template": "{% if"}, "chat_template: it does not comp"),
        (USER, {"chat_template": "{{ '{}'.format() }}"}, REFUSED),
        (USER, {"chat_template": "{{ raise_exception('no') }}"}, REFUSED),
        (USER, {"continue_final_message": True}, "'continue_final_message' and"),
        (USER, {"chat_template_kwargs": {"messages": 1}}, "Invalid value for 'chat_template_kwargs."),
        (USER, {"chat_template_kwargs": [1]}, "Invalid type for 'chat_template_kwargs': exp"),
        (USER, {"chat_template": 3}, "chat_template must be a text, got int"),
    ],
)  # fmt: skip
def test_a_bad_conversation(llm: LLM, messages: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.chat(messages, use_tqdm=False, **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("priority", "message"),
    [([1], "there are 2 prompts, but 1 priorities"), ([1, "a"], "priority must be a list"), (3, "priority must be")],
)
def test_a_bad_priority(llm: LLM, priority: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(["a", "b"], priority=priority, use_tqdm=False)


def test_adapters_are_not_there(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=2)
    assert len(llm.generate("a", greedy, use_tqdm=False, lora_request=None)) == 1
    lora: Any = object()
    for ask in (
        lambda: llm.generate("a", greedy, lora_request=lora),
        lambda: llm.chat([{"role": "user", "content": "a"}], greedy, lora_request=lora),
    ):
        with pytest.raises(InputError, match="lora_request must be None: adapters are not supported yet"):
            ask()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seq": 4}, UsageError, "unknown option 'max_num_seq'; did you mean max_num_seqs?"),
        ({"policy": "edff"}, UsageError, "did you mean edf?"),
        ({"max_num_seqs": "many"}, UsageError, "max_num_seqs='many': must be an integer"),
        ({"quantization": "int3"}, UsageError, "quantization='int3': must be one of none, int8, int4"),
        ({"quantization": "int8", "dtype": "half"}, UsageError, "dtype float16 cannot be combined with it; leave one"),
        ({"dtype": "float32"}, UsageError, "is for a model with weights"),
        ({"mem_fraction_static": 0.9}, UsageError, "its name here is gpu_memory_utilization"),
        ({"model": "no/such/folder/here"}, CheckpointError, "no/such/folder/here"),
        ({"num_blocks": 4, "max_model_len": 100}, UsageError, "raise num_blocks, or lower max_model_len"),
        ({"tokenizer": "fake"}, UsageError, "the fake model's tokenizer goes with the fake model,"),
    ],
)
def test_a_bad_option(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        LLM(**({"model": "fake"} | options))
    assert message in str(caught.value)


def test_every_option_by_its_name_and_a_record(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fake": FAKE, "policy": {"type": "edf", "multiplier": 2}}
    with LLM("fake", record=tmp_path / "runs", data_parallel_size=2, max_num_seqs=2, max_queue_len=1, **options) as llm:
        quiet(llm, [f"prompt {number}" for number in range(12)], seeded(n=2), priority=list(range(12)))
        folder = llm.run_folder
        pids = llm._composition.engine.worker_pids
    assert folder is not None
    assert folder.parent == tmp_path / "runs"
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    trace = verified(folder / "trace.jsonl")
    assert trace.result.clean_end
    arrived = trace.of(Arrived)
    # More than the queue holds: what is offline may wait.
    assert [(event.scheduling.priority, event.n, event.scheduling.offline, event.group_size) for event in arrived] == [
        (number, 2, True, 12) for number in range(12)
    ]


def test_the_seed_makes_calls_repeatable() -> None:
    def texts(seed: int | None) -> list[str]:
        with LLM("fake", fake=FAKE, seed=seed) as llm:
            outputs = quiet(llm, ["a", "b"]) + quiet(llm, ["a", "c"])
        return [output.outputs[0].text for output in outputs]

    first = texts(7)
    assert texts(7) == first
    assert len(set(first)) == 4
    assert texts(8) != first


def test_calls_from_several_threads(llm: LLM) -> None:
    found: dict[int, list[RequestOutput]] = {}

    def call(number: int) -> None:
        found[number] = quiet(llm, [f"{number}"] * 3, seeded(seed=number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, outputs in found.items():
        assert [output.outputs[0].text for output in outputs] == [fake_text(number, 12)] * 3
    ids = [output.request_id for outputs in found.values() for output in outputs]
    assert len(set(ids)) == 18


async def test_within_a_running_loop(llm: LLM) -> None:
    [output] = llm.generate("Hi", seeded(), use_tqdm=False)
    assert output.outputs[0].text == fake_text(5, 12)


def test_the_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], seeded())
    shown = capsys.readouterr()
    assert "Processed prompts: 100%" in shown.err
    assert "2/2" in shown.err
    assert "toks/s, output:" in shown.err
    assert shown.out == ""
    llm.generate(["a", "b"], seeded(), use_tqdm=False)
    assert capsys.readouterr().err == ""
    file = io.StringIO()
    llm.generate(["a", "b"], seeded(), use_tqdm=functools.partial(tqdm.tqdm, file=file))
    assert "Processed prompts: 100%" in file.getvalue()


def interrupted_by(action: Callable[[], None]) -> type[Any]:
    """A progress bar at whose first step something happens."""

    class Bar(tqdm.tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            action()
            return None

    return Bar


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_call_is_cancelled_and_the_llm_goes_on(tmp_path: Path) -> None:
    with LLM("fake", fake=SLOW, record=tmp_path) as llm:
        params = [seeded(max_tokens=1), seeded(max_tokens=8000)]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], params, use_tqdm=interrupted_by(interrupt))
        assert quiet(llm, "c", seeded())[0].outputs[0].text == fake_text(5, 12)
    assert llm.run_folder is not None
    trace = verified(llm.run_folder / "trace.jsonl")
    assert [event.reason for event in trace.of(Cancelled)] == ["client"]


def test_after_the_shutdown() -> None:
    llm = LLM("fake", fake=FAKE)
    assert repr(llm) == "LLM('fake')"
    llm.shutdown()
    llm.shutdown()
    assert repr(llm) == "LLM('fake', shut down)"
    with pytest.raises(EngineUnavailableError, match="this LLM was shut down; make a new one"):
        llm.generate("Hi", use_tqdm=False)


def test_a_shutdown_ends_calls_of_other_threads() -> None:
    llm = LLM("fake", fake=SLOW)
    done: list[BaseException | None] = []
    at_work = threading.Event()

    def call() -> None:
        try:
            llm.generate(
                ["a", "b"], [seeded(max_tokens=1), seeded(max_tokens=8000)], use_tqdm=interrupted_by(at_work.set)
            )
            done.append(None)
        except EngineUnavailableError as error:
            done.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert at_work.wait(PATIENCE_SECONDS)
    llm.shutdown()
    thread.join(PATIENCE_SECONDS)
    assert [str(error) for error in done] == ["this LLM was shut down while it worked"]


@pytest.mark.parametrize("max_restarts", [0, 5])
def test_a_worker_that_is_killed(max_restarts: int) -> None:
    with LLM("fake", fake=SLOW, max_restarts=max_restarts) as llm:
        [pid] = llm._composition.engine.worker_pids
        bar = interrupted_by(lambda: os.kill(pid, signal.SIGKILL) if is_running(pid) else None)
        params = [seeded(max_tokens=1), seeded(max_tokens=200 if max_restarts else 8000)]
        if max_restarts:
            outputs = llm.generate(["a", "b"], params, use_tqdm=bar)
            assert outputs[1].outputs[0].token_ids == expected_tokens(5, 0, 200)
            assert llm._composition.engine.worker_pids != [pid]
            return
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match=r"no worker is left|the engine is dead"):
                llm.generate(["a", "b"], params, use_tqdm=bar)


def test_it_stays_in_its_process(llm: LLM) -> None:
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="an LLM cannot be sent to another process"):
            send(llm)


#: Parameters of vLLM's methods (vllm/entrypoints/llm.py, 2025) that concern what this engine has, in vLLM's order, and
#: whether vLLM takes them by name only.
VLLM_SIGNATURES: dict[str, list[tuple[str, Any, bool]]] = {
    "generate": [("prompts", inspect.Parameter.empty, False), ("sampling_params", None, False),
                 ("use_tqdm", True, True), ("lora_request", None, True), ("priority", None, True)],
    "chat": [("messages", inspect.Parameter.empty, False), ("sampling_params", None, False), ("use_tqdm", True, False),
             ("chat_template", None, True), ("add_generation_prompt", True, True),
             ("continue_final_message", False, True), ("chat_template_kwargs", None, True)],
    "embed": [("prompts", inspect.Parameter.empty, False), ("use_tqdm", True, True)],
    "get_tokenizer": [],
    "get_default_sampling_params": [],
}  # fmt: skip


@pytest.mark.parametrize("method", VLLM_SIGNATURES)
def test_signatures_are_vllms(method: str) -> None:
    parameters = list(inspect.signature(getattr(LLM, method)).parameters.values())[1:]
    found = [(each.name, each.default, each.kind is each.KEYWORD_ONLY) for each in parameters]
    assert found[: len(VLLM_SIGNATURES[method])] == VLLM_SIGNATURES[method]


def test_the_constructor_takes_vllms_common_arguments() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "model"
    assert {"tokenizer", "seed", "data_parallel_size"} <= set(parameters)
