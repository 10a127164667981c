"""The chat page in a browser, against a server that runs: what its reader does and sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Route, expect

from eventlm.config import ServerConfig
from eventlm.engine.request import EngineUnavailableError, QueueFullError
from eventlm.server.auth.api_keys import ApiKeys
from eventlm.system.system import real_system
from eventlm.text.fake_tokenizer import FakeTokenizer
from tests.processes import wait_until
from tests.server.chat_page.opened_page import OpenedPage
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.tool_calls import CALL, TOOLS
from tests.serving import Server, fake_text, serve

pytestmark = pytest.mark.long

StartServer = Callable[..., RunningServer]
OpenPage = Callable[..., OpenedPage]
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def page(server: RunningServer, open_page: OpenPage) -> OpenedPage:
    server.engine.max_model_len = 4096
    return open_page(server.url)


@pytest.fixture(scope="module")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), "--model", "fake") as server:
        yield server


def last_prompt(server: RunningServer) -> str:
    """What the engine was asked last."""
    tokenizer = FakeTokenizer()
    ids = server.engine.requests[-1].prompt_token_ids
    return b"".join(tokenizer.special_bytes.get(each) or tokenizer.token_bytes(each) for each in ids).decode()


def turns(*texts: str) -> str:
    """The prompt of a conversation."""
    roles = ("user", "assistant")
    messages = [f"<|im_start|>{roles[number % 2]}\n{text}<|im_end|>\n" for number, text in enumerate(texts)]
    return "".join(messages) + "<|im_start|>assistant\n"


def test_a_conversation_outlives_a_reload(fake_server: Server, open_page: OpenPage) -> None:
    page = open_page(fake_server.url)
    page.set(seed="4", maxTokens="40")
    said = fake_text(4, 40)
    page.ask("What is an event?")
    for _ in range(2):
        expect(page.reply).to_have_text(said)
        expect(page.replies).to_contain_text("40 tokens · ")
        expect(page.replies).to_contain_text(" tokens/s · first token after ")
        expect(page.sidebar.get_by_role("link")).to_have_text("What is an event?")
        page.reload()
    page.ask("And a log?")
    expect(page.replies).to_have_count(2)
    expect(page.questions).to_have_text(["What is an event?", "And a log?"])
    # The address of the server, without that of the conversation, leads to a new one.
    page.page.goto(fake_server.url)
    expect(page.questions).to_have_count(0)
    page.sidebar.get_by_role("link").click()
    expect(page.replies).to_have_count(2)
    page.page.go_back()
    expect(page.questions).to_have_count(0)


def test_a_reply_is_shown_as_it_comes(server: RunningServer, page: OpenedPage) -> None:
    server.engine.most_said = 5
    page.send("hi")
    expect(page.reply).to_have_text("Hello")
    expect(page.button("Stop")).to_be_visible()
    expect(page.button("Generate again")).to_have_count(0)
    server.engine.most_said = 100
    expect(page.reply).to_have_text("Hello, world")
    page.wait_complete()
    expect(page.composer).to_be_focused()
    expect(page.composer).to_be_empty()


@pytest.mark.parametrize(("resume_seconds", "by_whom"), [(0, "client"), (60, "owner")])
def test_stop_ends_it_on_the_server(
    start_server: StartServer, open_page: OpenPage, resume_seconds: int, by_whom: str
) -> None:
    """Even where it would go on without its client."""
    server = start_server(resume_seconds=resume_seconds)
    server.engine.script_end, server.engine.most_said = None, 5
    page = open_page(server.url)
    for number, stop in enumerate((lambda: page.button("Stop").click(), lambda: page.page.keyboard.press("Escape"))):
        page.begin("hi")
        expect(page.reply).to_have_text("Hello")
        stop()
        expect(page.replies.last).to_contain_text("Stopped.")
        expect(page.reply).to_have_text("Hello")
        wait_until(lambda number=number: server.engine.cancelled_by.get(number) == by_whom)
        server.engine.most_said += 5


def test_the_reader_is_not_taken_away_from_what_is_read(server: RunningServer, page: OpenedPage) -> None:
    server.engine.script = spell("line\n\n" * 100)
    page.ask("hi")
    server.engine.most_said = server.engine.num_said + 60
    page.begin("more")
    expect(page.reply).to_contain_text("line")
    scroller = page.page.locator("#scroller")
    scroller.evaluate("node => { node.scrollTop = 100; }")
    expect(page.button("Go to the end")).to_be_visible()
    expect(page.button("Edit and send again")).to_have_count(0)
    server.engine.most_said = 10_000
    page.wait_complete()
    assert scroller.evaluate("node => node.scrollTop") == 100
    expect(page.button("Edit and send again").first).to_be_attached()
    page.button("Go to the end").click()
    expect(page.button("Generate again")).to_be_in_viewport()
    expect(page.button("Go to the end")).not_to_be_visible()


def test_a_reply_is_generated_again(server: RunningServer, page: OpenedPage) -> None:
    page.ask("hi", "Hello, world")
    server.engine.script = spell("Good morning")
    page.button("Generate again").click()
    expect(page.reply).to_have_text("Good morning")
    expect(page.replies).to_have_count(1)
    assert last_prompt(server) == turns("hi")


def test_a_message_is_edited_and_sent_again(server: RunningServer, page: OpenedPage) -> None:
    page.ask("hi")
    page.ask("bye")
    assert last_prompt(server) == turns("hi", "Hello, world", "bye")
    page.questions.first.hover()
    page.button("Edit and send again").first.click()
    page.page.keyboard.press("Escape")
    expect(page.questions).to_have_text(["hi", "bye"])
    page.button("Edit and send again").first.click()
    editor = page.page.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    editor.fill("good day")
    editor.press("Enter")
    expect(page.questions).to_have_text(["good day"])
    page.wait_complete()
    assert last_prompt(server) == turns("good day")


def test_what_is_not_replaced_comes_back(server: RunningServer, page: OpenedPage) -> None:
    """A reply that fails or is stopped before its first word takes the place of nothing."""
    page.ask("hi", "Hello, world")
    server.engine.script = spell("Good morning")
    server.engine.submit_error = QueueFullError("the queue is full")
    page.button("Generate again").click()
    expect(page.notice).to_contain_text("The server is too busy.")
    expect(page.reply).to_have_text("Hello, world")
    page.questions.hover()
    page.button("Edit and send again").click()
    page.page.get_by_label("Edit the message").fill("good day")
    page.page.keyboard.press("Enter")
    expect(page.notice).to_contain_text("The server is too busy.")
    for _ in range(2):
        expect(page.questions).to_have_text(["hi"])
        expect(page.reply).to_have_text("Hello, world")
        expect(page.sidebar.get_by_role("link")).to_have_text("hi")
        # Neither stopped nor left is it lost.
        server.engine.submit_error = None
        server.engine.most_said = server.engine.num_said
        page.button("Generate again").click()
        expect(page.reply).to_have_text("")
        page.button("Stop").click()
        expect(page.reply).to_have_text("Hello, world")
        page.button("Generate again").click()
        expect(page.reply).to_have_text("")
        page.reload()
    server.engine.submit_error = QueueFullError("the queue is full")
    page.page.get_by_label("You").hover()
    page.button("Edit and send again").click()
    page.page.get_by_label("Edit the message").fill("good day")
    page.page.keyboard.press("Enter")
    expect(page.notice).to_contain_text("The server is too busy.")
    server.engine.submit_error, server.engine.most_said = None, 1000
    page.button("Try again").click()
    expect(page.notice).not_to_be_visible()
    expect(page.questions).to_have_text(["good day"])
    expect(page.reply).to_have_text("Good morning")


def test_a_message_is_sent_once(page: OpenedPage) -> None:
    """Even while the page does not know yet which models there are, and what is written meanwhile stays."""
    held: list[Route] = []
    page.page.route("**/v1/models", lambda route: held.append(route))
    page.page.reload()
    page.composer.fill("hi")
    for key in ("Enter", "Enter", "m", "o", "r", "e", "Enter"):
        page.composer.press(key)
    expect(page.composer).to_have_value("more")
    [only] = held
    only.continue_()
    expect(page.reply).to_have_text("Hello, world")
    expect(page.questions).to_have_text(["hi"])
    expect(page.composer).to_have_value("more")


def test_only_one_tab_writes_in_a_conversation(server: RunningServer, page: OpenedPage) -> None:
    page.ask("one")
    server.engine.most_said = server.engine.num_said + 5
    page.begin("two")
    expect(page.reply).to_have_text("Hello")
    other = page.second_tab()
    other.send("three")
    expect(other.notice).to_contain_text("Another tab is writing a reply in this conversation.")
    expect(other.composer).to_have_value("three")
    other.button("Rename this conversation").click()
    other.page.keyboard.type("numbers")
    other.page.keyboard.press("Enter")
    expect(page.sidebar.get_by_role("link")).to_have_text("numbers")
    other.button("Rename this conversation").click()
    other.page.keyboard.type("counting")
    server.engine.most_said = 1000
    page.wait_complete()
    expect(other.reply).to_have_text("Hello, world")
    other.page.keyboard.press("Enter")
    expect(page.sidebar.get_by_role("link")).to_have_text("counting")
    other.ask("three", "Hello, world")
    for each in (page, other):
        expect(each.questions).to_have_text(["one", "two", "three"])
        expect(each.replies).to_have_count(3)
        each.reload()
        expect(each.replies).to_have_count(3)
        expect(each.sidebar.get_by_role("link")).to_have_text("counting")
    page.button("Delete this conversation").click()
    expect(other.questions).to_have_count(0)
    assert other.problems == []


def test_another_tab_leaves_the_reader_alone(server: RunningServer, page: OpenedPage) -> None:
    server.engine.script = spell("line\n\n" * 60)
    page.ask("one")
    page.ask("two")
    other = page.second_tab()
    scroller = other.page.locator("#scroller")
    other.questions.first.hover()
    other.button("Edit and send again").first.click()
    other.page.get_by_label("Edit the message").fill("a draft")
    scroller.evaluate("node => { node.scrollTop = 50; }")
    page.ask("three")
    expect(other.replies).to_have_count(3)
    expect(other.page.get_by_label("Edit the message")).to_have_value("a draft")
    assert scroller.evaluate("node => node.scrollTop") == 50
    assert other.problems == []


def test_the_models_are_asked_for_again_when_they_may_have_changed(server: RunningServer, page: OpenedPage) -> None:
    page.ask("hi")
    server.engine.model_names = ["first"]
    page.button("Generate again").click()
    expect(page.notice).to_contain_text("The server does not have this model.")
    expect(page.model_picker).to_have_value("first")
    expect(page.reply).to_have_text("Hello, world")
    server.engine.script = spell("Good morning")
    page.button("Try again").click()
    expect(page.reply).to_have_text("Good morning")
    expect(page.notice).not_to_be_visible()
    server.engine.model_names = ["second"]
    page.ask("more", "The server does not have this model.")
    expect(page.model_picker).to_have_value("second")
    page.button("Try again").click()
    expect(page.reply).to_have_text("Good morning")
    # As when the server is started again with another model.
    page.page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
    page.ask("and", "The server cannot be reached.")
    server.engine.model_names = ["third"]
    page.button("Try again").click()
    expect(page.reply).to_have_text("Good morning")
    expect(page.model_picker).to_have_value("third")


def test_a_reply_that_cannot_be_read(page: OpenedPage) -> None:
    cases = [
        (502, "null", "The server answered with the status 502."),
        (502, '{"error": null}', "The server answered with the status 502."),
        (502, '{"error": "no"}', "The server answered with the status 502."),
        (502, "<html>", "The server answered with the status 502."),
        (200, "data: {broken\n\n", "The server sent an unreadable reply."),
        (200, "data: null\n\n", "The server sent an unreadable reply."),
        (200, 'data: {"choices": [{"index": 0, "delta": {"tool_calls": [{}]}}]}\n\n', "an unreadable reply."),
        (200, 'data: {"id": "x"}\n\n', "The connection was lost before the reply was complete."),
    ]
    answers = [(status, body) for status, body, _ in cases]

    def answer(route: Route) -> None:
        status, body = answers.pop(0)
        route.fulfill(status=status, body=body)

    page.page.route("**/v1/chat/completions", answer, times=len(cases))
    for _, _, said in cases:
        page.ask("hi", said)
        for words in ("undefined", "null", "JSON", "properties"):
            expect(page.replies.last).not_to_contain_text(words)
    page.ask("and now?", "Hello, world")


def test_a_list_of_models_that_cannot_be_read(page: OpenedPage) -> None:
    bodies = ["<html>", "null", "{}", '{"data": [null]}']
    page.page.route("**/v1/models", lambda route: route.fulfill(status=200, body=bodies.pop()), times=4)
    while bodies:
        page.reload()
        expect(page.notice).to_contain_text("The server sent an unreadable reply.")
    page.button("Try again").click()
    page.ask("hi", "Hello, world")


def test_a_call_that_is_cut_is_left_out(page: OpenedPage) -> None:
    def sent_call(*arguments: str) -> str:
        function = {"name": "find", "arguments": ""}
        deltas = [{"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": function}]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in arguments]
        return "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': each}]})}\n\n" for each in deltas)

    body = sent_call('{"city":', ' "Ul')
    page.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=body), times=1)
    page.ask("hi", "The connection was lost before the reply was complete.")
    expect(page.replies).not_to_contain_text("find")
    expect(page.page.get_by_label("Result of find")).to_have_count(0)
    with page.page.expect_request("**/v1/chat/completions") as sent:
        page.ask("more")
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "user"]


def test_what_is_stored_in_another_format_is_not_shown(page: OpenedPage) -> None:
    page.ask("hi")
    page.page.evaluate(
        """() => {
        const key = Object.keys(localStorage).find((each) => each.startsWith("eventlm.conversation."));
        const good = JSON.parse(localStorage[key]);
        const changes = [{updated: undefined}, {version: 2}, {messages: null}, {messages: [null]}, {title: 1},
            ...["toolCalls", "reasoning", "content"].map((name) => (
                {messages: good.messages.map((each) => ({...each, [name]: undefined}))})),
            {messages: good.messages.map((each) => ({...each, stats: {}}))}];
        changes.forEach((change, id) => {
            localStorage[`eventlm.conversation.${id}`] = JSON.stringify({...good, ...change, id: String(id)});
        });
        const settings = {moreParameters: null, apiKey: 1, temperature: "x", systemPrompt: [], seed: 7};
        localStorage["eventlm.settings"] = JSON.stringify(settings);
    }"""
    )
    page.reload()
    expect(page.sidebar.get_by_role("link")).to_have_text("hi")
    page.ask("more", "Hello, world")
    page.button("Settings").click()
    for name, value in (("apiKey", ""), ("temperature", ""), ("systemPrompt", ""), ("seed", "7")):
        expect(page.page.locator(f"#settings [name={name}]")).to_have_value(value)
    page.button("Close").click()
    # Left alone, though, for the version of the page that can read it.
    assert page.page.evaluate("localStorage['eventlm.conversation.1']")


def test_a_title_can_be_written_while_a_reply_ends(server: RunningServer, page: OpenedPage) -> None:
    server.engine.most_said = 5
    page.begin("one")
    page.button("Rename this conversation").click()
    page.page.keyboard.type("num")
    server.engine.most_said = 100
    page.wait_complete()
    page.page.keyboard.type("ber")
    title = page.page.get_by_label("Title of the conversation")
    expect(title).to_have_value("number")
    title.press("Enter")
    expect(page.sidebar.get_by_role("link")).to_have_text("number")
    page.button("Rename this conversation").click()
    page.page.keyboard.type("x")
    page.page.keyboard.press("Escape")
    expect(page.sidebar.get_by_role("link")).to_have_text("number")
    expect(page.button("Rename this conversation")).to_be_visible()


def test_keys_of_an_input_method_do_nothing_else(server: RunningServer, page: OpenedPage) -> None:
    """Enter takes a word there, and Escape none."""

    def press(field: Locator, key: str) -> None:
        init = {"key": key, "isComposing": True, "bubbles": True, "cancelable": True}
        field.evaluate("(field, init) => field.dispatchEvent(new KeyboardEvent('keydown', init))", init)

    page.ask("hi")
    page.questions.hover()
    page.button("Edit and send again").click()
    page.button("Rename this conversation").click()
    server.engine.most_said = server.engine.num_said + 5
    page.begin("more")
    expect(page.reply).to_have_text("Hello")
    page.button("Rename this conversation").click()
    for label in ("Edit the message", "Title of the conversation", "Message"):
        for key in ("Enter", "Escape"):
            press(page.page.get_by_label(label, exact=True), key)
    expect(page.page.get_by_label("Edit the message")).to_be_visible()
    expect(page.page.get_by_label("Title of the conversation")).to_be_visible()
    server.engine.most_said = 1000
    page.wait_complete()
    expect(page.reply).to_have_text("Hello, world")


def test_the_end_of_a_reply_is_announced_and_keeps_the_focus(server: RunningServer, page: OpenedPage) -> None:
    announced = page.page.locator("#announcement")
    server.engine.most_said = 5
    page.begin("hi")
    expect(page.reply).to_have_text("Hello")
    page.button("Stop").click()
    expect(announced).to_have_text("Stopped.")
    server.engine.most_said = server.engine.num_said + 5
    page.begin("hi")
    page.button("Stop").focus()
    server.engine.most_said = 1000
    page.wait_complete()
    expect(announced).to_have_text("The reply is complete.")
    expect(page.composer).to_be_focused()


def test_the_skip_link_leads_to_the_composer(page: OpenedPage) -> None:
    page.ask("hi")
    address = page.page.url
    page.page.get_by_role("link", name="Skip to the message").press("Enter")
    expect(page.composer).to_be_focused()
    expect(page.questions).to_have_text(["hi"])
    assert page.page.url == address


def test_selecting_text_does_not_close_the_settings(page: OpenedPage) -> None:
    page.button("Settings").click()
    field = page.page.get_by_label("System prompt")
    field.fill("a long text")
    box = field.bounding_box()
    assert box is not None
    mouse = page.page.mouse
    mouse.move(box["x"] + 60, box["y"] + 15)
    mouse.down()
    mouse.move(5, box["y"] + 15, steps=5)
    mouse.up()
    expect(field).to_be_visible()
    expect(field).to_have_value("a long text")
    mouse.click(5, 5)
    expect(field).not_to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_borders_of_fields_can_be_seen(server: RunningServer, open_page: OpenPage, scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme)
    contrasts = """() => {
        const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
            .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
            .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0.05);
        const ratio = (a, b) => Math.max(light(a) / light(b), light(b) / light(a));
        const fields = [...document.querySelectorAll("#composer, dialog textarea, dialog input:not([type=checkbox])")];
        return fields.flatMap((field) => {
            const { borderTopColor, backgroundColor } = getComputedStyle(field);
            const around = field.closest("dialog") ?? document.body;
            const behind = [backgroundColor, getComputedStyle(around).backgroundColor];
            return behind.map((each) => ratio(borderTopColor, each));
        });
    }"""
    found = page.page.evaluate(contrasts)
    assert len(found) >= 14
    assert min(found) >= 3


def test_the_focus_stays_in_the_list_that_lies_over_the_page(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 390, "height": 780})
    page.ask("hi")
    page.button("Conversations").click()
    reached = set()
    for _ in range(12):
        page.page.keyboard.press("Tab")
        reached.add(page.page.evaluate("document.activeElement.closest('main, aside, a')?.tagName"))
    assert "MAIN" not in reached
    page.page.keyboard.press("Escape")
    page.ask("more", "Hello, world")


def test_what_is_set_is_sent(server: RunningServer, page: OpenedPage) -> None:
    fields = {"systemPrompt": "Be brief.", "temperature": "0.5", "topP": "0.9", "maxTokens": "5", "seed": "7"}
    page.set(**fields, moreParameters='{"top_k": 3, "stream": false}')
    for _ in range(2):
        page.ask("hi", "The reply has reached its limit of tokens.")
        expect(page.reply).to_have_text("Hello")
        sampling = server.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.top_k) == (0.5, 0.9, 5, 3)
        assert sampling.seed == 7
        assert last_prompt(server).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<")
        page.reload()
    page.button("Settings").click()
    page.button("Reset").click()
    page.button("Save").click()
    page.ask("hi", "Hello, world")
    assert "Be brief." not in last_prompt(server)


def test_what_cannot_be_set_is_refused_at_once(page: OpenedPage) -> None:
    for field, value in (("moreParameters", "{"), ("moreParameters", "[1]"), ("topP", "2"), ("maxTokens", "0.5")):
        page.set(**{field: value})
        wrong = page.page.locator(f"#settings [name={field}]")
        expect(wrong).to_be_visible()
        assert wrong.evaluate("field => field.validationMessage")
        page.page.keyboard.press("Escape")
        expect(wrong).not_to_be_visible()
        page.button("Settings").click()
        expect(wrong).to_have_value("")
        page.button("Close").click()


def test_a_wrong_key(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(api_key="schlüssel")
    page = open_page(server.url)
    expect(page.notice).to_contain_text("This server needs an API key.")
    page.button("Enter API key").click()
    expect(page.page.get_by_label("API key")).to_be_focused()
    page.page.keyboard.type("wrong")
    page.page.keyboard.press("Enter")
    expect(page.notice).to_contain_text("The server does not accept this API key. Incorrect API key provided.")
    page.send("hi")
    expect(page.composer).to_have_value("hi")
    expect(page.questions).to_have_count(0)
    page.set(apiKey="schlüssel")
    expect(page.notice).not_to_be_visible()
    page.ask("hi", "Hello, world")
    # A key may be withdrawn in the middle of a conversation.
    server.context.keys = ApiKeys(real_system(), ServerConfig(api_key="another"))
    page.ask("and now?", "The server does not accept this API key.", "Incorrect API key provided.")
    server.context.keys = ApiKeys(real_system(), ServerConfig(api_key="schlüssel"))
    page.button("Try again").click()
    expect(page.reply).to_have_text("Hello, world")


def test_errors_are_told_and_tried_again(server: RunningServer, page: OpenedPage) -> None:
    server.engine.submit_error = QueueFullError("the queue is full: 1024 sequences wait")
    page.ask("hi", "The server is too busy. Try again in 1 s.", "The queue is full: 1024 sequences wait.")
    server.engine.submit_error = None
    page.button("Try again").click()
    page.wait_complete()
    expect(page.replies).to_have_count(1)
    expect(page.reply).to_have_text("Hello, world")
    page.set(maxTokens="5000")
    page.ask("more", "The conversation is too long for this model.", "4096")
    # What failed before its first word is no part of the conversation.
    page.set(maxTokens="50")
    page.ask("less", "Hello, world")
    assert last_prompt(server).count("assistant") == 2


def test_an_error_in_the_middle_of_a_reply(server: RunningServer, page: OpenedPage) -> None:
    server.engine.most_said = 5
    page.send("hi")
    expect(page.reply).to_have_text("Hello")
    server.loop.call_soon_threadsafe(server.engine.fail, EngineUnavailableError("the engine has died"))
    expect(page.replies).to_contain_text("The engine has died")
    expect(page.reply).to_have_text("Hello")
    page.reload()
    expect(page.replies).to_contain_text("The engine has died")


def test_a_server_that_is_gone(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(drain_seconds=0)
    page = open_page(server.url)
    server.call(server._server.close())
    page.ask("hi", "The server cannot be reached.", "Check that the server is running")


@pytest.mark.parametrize(("resume_seconds", "by_whom"), [(0, "client"), (60, "owner")])
def test_a_page_that_is_left_in_the_middle_says_so(
    start_server: StartServer, open_page: OpenPage, resume_seconds: int, by_whom: str
) -> None:
    """And the server writes for nobody."""
    server = start_server(resume_seconds=resume_seconds)
    page = open_page(server.url)
    server.engine.most_said = 5
    page.send("hi")
    expect(page.reply).to_have_text("Hello")
    page.reload()
    wait_until(lambda: server.engine.cancelled_by == {0: by_whom})
    expect(page.reply).to_have_text("Hello")
    expect(page.replies).to_contain_text("The page was left before the reply was complete.")


def test_a_lost_connection_is_taken_up_again(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(resume_seconds=60)
    page = open_page(server.url)

    def cut(route: Route) -> None:
        response = route.fetch()
        events = response.text().split("\n\n")
        assert len(events) > 8
        route.fulfill(response=response, body="\n\n".join(events[:5]) + "\n\ndata: {")

    page.page.route("**/v1/chat/completions", cut)
    page.ask("hi", "Hello, world", "12 tokens")
    expect(page.page.get_by_role("alert")).to_have_count(0)
    assert len(server.engine.requests) == 1


def test_replies_of_several_conversations_go_on(server: RunningServer, page: OpenedPage) -> None:
    server.engine.most_said = 5
    page.send("first")
    expect(page.reply).to_have_text("Hello")
    page.button("New conversation").click()
    expect(page.button("Send")).to_be_visible()
    server.engine.most_said = 100
    page.ask("second", "Hello, world")
    page.sidebar.get_by_role("link", name="first").click()
    page.wait_complete()
    expect(page.reply).to_have_text("Hello, world")


def test_reasoning_is_folded_and_can_be_hidden(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(reasoning_parser="qwen3")
    server.engine.script = spell("<think>\nIs it?\n</think>\n\nYes.")
    page = open_page(server.url)
    page.ask("hi")
    expect(page.reply).to_have_text("Yes.")
    reasoning = page.replies.get_by_text("Is it?")
    expect(reasoning).not_to_be_visible()
    page.replies.get_by_text("Reasoning").click()
    expect(reasoning).to_be_visible()
    page.button("Settings").click()
    page.page.get_by_label("Show the model's reasoning").uncheck()
    page.button("Save").click()
    expect(page.replies.get_by_text("Reasoning")).not_to_be_visible()
    page.ask("again")
    assert "Is it?" not in last_prompt(server)


def test_tools_are_called_and_answered(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(tool_parser="hermes")
    server.engine.max_model_len = 4096
    page = open_page(server.url)
    page.set(moreParameters=json.dumps({"tools": TOOLS}))
    server.engine.script = spell(CALL)
    page.ask("How is the weather?", "Call of get_weather", '"city": "Zürich 🙂"')
    server.engine.script = spell("It snows.")
    page.page.get_by_label("Result of get_weather").fill("snow")
    page.button("Send results").click()
    expect(page.reply).to_have_text("It snows.")
    expect(page.page.get_by_label("Result of get_weather")).to_contain_text("snow")
    prompt = last_prompt(server)
    assert "<tool_response>\nsnow\n</tool_response>" in prompt
    assert prompt.index("How is the weather?") < prompt.index("Zürich") < prompt.index("snow")


def test_a_model_without_a_chat_template_continues_the_text(server: RunningServer, page: OpenedPage) -> None:
    server.context.tokenizer.chat_template = None
    for question, prompt in (("Once", "Once"), ("and then", "Once\nHello, world\nand then")):
        page.ask(question, "This model has no chat template", "it continues the text")
        expect(page.reply).to_have_text("Hello, world")
        assert last_prompt(server) == "<|bos|>" + prompt


def test_the_model_can_be_chosen(page: OpenedPage) -> None:
    expect(page.model_picker.locator("option")).to_have_text(["test", "org/test"])
    page.model_picker.select_option("org/test")
    for _ in range(2):
        with page.page.expect_request("**/v1/chat/completions") as sent:
            page.ask("hi")
        assert sent.value.post_data_json["model"] == "org/test"
        page.reload()
        expect(page.model_picker).to_have_value("org/test")


def test_conversations_are_renamed_exported_and_deleted(page: OpenedPage, tmp_path: Path) -> None:
    page.set(apiKey="secret")
    page.ask("one")
    page.button("New conversation").click()
    page.ask("two")
    titles = page.sidebar.get_by_role("link")
    expect(titles).to_have_text(["two", "one"])
    page.button("Rename this conversation").click()
    title = page.page.get_by_label("Title of the conversation")
    expect(title).to_have_value("two")
    title.fill("Zwei / 2")
    title.press("Enter")
    expect(titles).to_have_text(["Zwei / 2", "one"])
    with page.page.expect_download() as download:
        page.button("Export this conversation as JSON").click()
    assert download.value.suggested_filename == "Zwei-2.json"
    download.value.save_as(tmp_path / "exported.json")
    exported = json.loads((tmp_path / "exported.json").read_text())
    assert [(message["role"], message["content"]) for message in exported["messages"]] == [
        ("user", "two"),
        ("assistant", "Hello, world"),
    ]
    assert "secret" not in json.dumps(exported)
    page.button("Delete this conversation").click()
    expect(titles).to_have_text(["one"])
    expect(page.questions).to_have_count(0)
    page.button("Undo").click()
    expect(titles).to_have_text(["Zwei / 2", "one"])
    page.button("Settings").click()
    page.button("Delete all conversations").click()
    expect(titles).to_have_count(0)
    page.reload()
    expect(titles).to_have_count(0)


def test_another_tab_shows_the_same_conversations(page: OpenedPage) -> None:
    other = page.context.new_page()
    other.goto(page.page.url)
    page.ask("one")
    expect(other.get_by_role("link", name="one")).to_be_visible()
    page.button("Delete this conversation").click()
    expect(other.get_by_role("link", name="one")).to_have_count(0)


def test_a_full_storage_is_told(page: OpenedPage) -> None:
    page.page.evaluate("""() => {
        for (let size = 1 << 20; size; size >>= 1)
            try { for (let n = 0; ; n++) localStorage.setItem(`${size}.${n}`, "x".repeat(size)); } catch {}
    }""")
    page.ask("hi", "Hello, world")
    expect(page.notice).to_contain_text("The browser's storage is full.")
    page.reload()
    expect(page.model_picker).to_have_value("test")


def test_the_theme_is_that_of_the_system_until_it_is_chosen(server: RunningServer, open_page: OpenPage) -> None:
    brightness = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) / 3"
    for scheme in ("light", "dark"):
        page = open_page(server.url, color_scheme=scheme)
        for theme, is_light in (("as the system", scheme == "light"), ("light", True), ("dark", False)):
            expect(page.button(f"Theme: {theme}")).to_be_visible()
            assert (page.page.evaluate(brightness) > 128) == is_light
            page.button(f"Theme: {theme}").click()
        page.button("Theme: as the system").click()
        page.reload()
        assert page.page.evaluate(brightness) > 128
        expect(page.button("Theme: light")).to_be_visible()


def test_code_and_replies_are_copied(server: RunningServer, open_page: OpenPage) -> None:
    text = "So:\n\n```python\nprint(1)\n```"
    server.engine.script = spell(text)
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    page.ask("hi")
    for name, copied in (("Copy code", "print(1)"), ("Copy reply", text)):
        page.button(name).click()
        wait_until(lambda copied=copied: page.page.evaluate("navigator.clipboard.readText()") == copied)


def test_a_phone_shows_the_list_over_the_page(server: RunningServer, open_page: OpenPage) -> None:
    server.engine.script = spell("```\n" + "wide " * 100 + "\n```\n" + "long" * 100)
    page = open_page(server.url, **PHONE)
    expect(page.sidebar).not_to_be_visible()
    page.composer.fill("hi")
    # The key of a phone's keyboard starts a new line.
    page.composer.press("Enter")
    expect(page.composer).to_have_value("hi\n")
    page.button("Send").tap()
    page.wait_complete()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    page.button("Conversations").tap()
    page.button("New conversation").tap()
    expect(page.sidebar).not_to_be_visible()
    expect(page.questions).to_have_count(0)
    page.button("Conversations").tap()
    page.page.keyboard.press("Escape")
    expect(page.sidebar).not_to_be_visible()


def test_it_can_be_used_without_a_mouse(server: RunningServer, page: OpenedPage) -> None:
    expect(page.composer).to_be_focused()
    page.page.keyboard.type("two")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("lines")
    page.page.keyboard.press("Enter")
    expect(page.reply).to_have_text("Hello, world")
    page.wait_complete()
    assert last_prompt(server) == turns("two\nlines")
    reached = []
    for _ in range(30):
        page.page.keyboard.press("Tab")
        reached.append(
            page.page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()")
        )
    for name in ("New conversation", "two", "Rename this conversation", "Settings", "Copy reply", "Generate again"):
        assert name in reached
    page.button("Settings").press("Enter")
    unnamed = """() => [...document.querySelectorAll("button, input, textarea, select")]
        .filter((each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim()))
        .map((each) => each.outerHTML)"""
    assert page.page.evaluate(unnamed) == []
