"""The output of a response while it grows: its items, and the events that tell of them.

Items follow each other: reasoning, a message, calls. One begins where the kind of the text changes, and each is done
before the next begins.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from eventlm.server.openai.chat import call_id
from eventlm.server.openai.replies import TokenLogprob
from eventlm.server.responses.events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
)
from eventlm.server.responses.items import item_id
from eventlm.server.responses.protocol import ItemStatus
from eventlm.server.responses.replies import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from eventlm.text.tools.message import CallDelta, MessagePart
from eventlm.text.tools.parser_events import Content, Reasoning

_NO_LOGPROBS: list[TokenLogprob] = []


class ResponseOutput:
    """The output of one response. items: those that are done. num_events: the number of the next event.

    Each method returns the events of what it did.
    """

    def __init__(self, reply_id: str) -> None:
        self.items: list[OutputItem] = []
        self.num_events = 0
        self._reply_id = reply_id
        #: Of the item that grows, without its text.
        self._item: OutputItem | None = None
        self._item_id = ""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def number(self) -> int:
        """The number of the next event."""
        number = self.num_events
        self.num_events = number + 1
        return number

    def add(self, part: MessagePart, logprobs: list[TokenLogprob] = _NO_LOGPROBS) -> list[Any]:
        """The next part of the text. logprobs: of the tokens of a message."""
        if isinstance(part, Content):
            return self._add_content(part.text, logprobs)
        if isinstance(part, Reasoning):
            return self._add_reasoning(part.text)
        if isinstance(part, CallDelta):
            return self._add_call(part)
        return self.end_item("completed")

    def end(self, status: ItemStatus, logprobs: list[TokenLogprob] = _NO_LOGPROBS) -> list[Any]:
        """The text is over. Without any, the output is an empty message. logprobs: of tokens without text.

        A call that has not ended is incomplete.
        """
        is_empty = self._item is None and not self.items
        events = self._add_content("", logprobs) if is_empty else []
        if logprobs and not is_empty and isinstance(self._item, OutputMessage):
            events += self._add_content("", logprobs)
        return events + self.end_item("incomplete" if isinstance(self._item, FunctionCallItem) else status)

    def end_item(self, status: ItemStatus) -> list[Any]:
        """The item that grows, if any, is done."""
        item = self._item
        if item is None:
            return []
        self._item = None
        text, index = "".join(self._texts), len(self.items)
        events: list[Any]
        match item:
            case OutputMessage():
                part = OutputText(text, logprobs=self._logprobs)
                events = [
                    OutputTextDone(self.number(), item.id, index, 0, text, self._logprobs),
                    ContentPartDone(self.number(), item.id, index, 0, part),
                ]
                done: OutputItem = structs.replace(item, status=status, content=[part])
            case ReasoningItem():
                thought = ReasoningText(text)
                events = [
                    ReasoningTextDone(self.number(), item.id, index, 0, text),
                    ContentPartDone(self.number(), item.id, index, 0, thought),
                ]
                done = structs.replace(item, status=status, content=[thought])
            case FunctionCallItem():
                events = [CallArgumentsDone(self.number(), item.id, index, item.name, text)]
                done = structs.replace(item, status=status, arguments=text)
        events.append(OutputItemDone(self.number(), index, done))
        self.items.append(done)
        return events

    def _add_content(self, text: str, logprobs: list[TokenLogprob]) -> list[Any]:
        events: list[Any] = []
        if not isinstance(self._item, OutputMessage):
            events = self._begin(OutputMessage(id=self._new_id("message"), status="in_progress", content=[]))
            events.append(ContentPartAdded(self.number(), self._item_id, len(self.items), 0, OutputText("")))
        self._texts.append(text)
        if logprobs:
            self._logprobs += logprobs
        if text or logprobs:
            events.append(OutputTextDelta(self.number(), self._item_id, len(self.items), 0, text, logprobs))
        return events

    def _add_reasoning(self, text: str) -> list[Any]:
        events: list[Any] = []
        if not isinstance(self._item, ReasoningItem):
            events = self._begin(ReasoningItem(id=self._new_id("reasoning"), status="in_progress", content=[]))
            events.append(ContentPartAdded(self.number(), self._item_id, len(self.items), 0, ReasoningText("")))
        self._texts.append(text)
        events.append(ReasoningTextDelta(self.number(), self._item_id, len(self.items), 0, text))
        return events

    def _add_call(self, call: CallDelta) -> list[Any]:
        events: list[Any] = []
        if call.name:
            item = FunctionCallItem(
                id=self._new_id("function_call"),
                status="in_progress",
                call_id=call_id(self._reply_id, 0, call.index),
                name=call.name,
                arguments="",
            )
            events = self._begin(item)
        if call.arguments:
            self._texts.append(call.arguments)
            events.append(CallArgumentsDelta(self.number(), self._item_id, len(self.items), call.arguments))
        return events

    def _begin(self, item: OutputItem) -> list[Any]:
        events = self.end_item("completed")
        self._item, self._item_id, self._texts, self._logprobs = item, item.id, [], []
        events.append(OutputItemAdded(self.number(), len(self.items), item))
        return events

    def _new_id(self, type_: str) -> str:
        return item_id(type_, self._reply_id, f"output/{len(self.items) + (self._item is not None)}")
