// The messages of a conversation, as they are shown.

import { copyButton, element, growWithText, icon, iconButton, onKey, sendOnEnter } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { describeEnd, describePrompt, describeStats } from "./reply.js";

/** How near to the end, in pixels, still counts as the end. */
const NEAR = 48;

export class Transcript {
  #container = document.getElementById("messages");
  #scroller = document.getElementById("scroller");
  #jump = document.getElementById("jump");
  #actions;
  #shownId = null;
  /** [{key, message, view}]; the key is null while the message grows. */
  #shown = [];
  #isAtEnd = true;

  /** Actions: again(), edit(index of the message, text), answerCalls(results by call id), enterKey(). */
  constructor(actions) {
    this.#actions = actions;
    this.#scroller.addEventListener("scroll", () => this.#look());
    new ResizeObserver(() => this.#follow()).observe(this.#scroller);
    this.#jump.onclick = () => this.scrollToEnd();
  }

  /**
   * Show a conversation; `running` is the message that still grows, if any. If it is the one shown, messages before
   * the first change stay as they are, and so does the scroll position.
   */
  show({ id, messages }, running) {
    const isOther = id !== this.#shownId;
    const views = messages.map((message, index) => {
      const isLast = index === messages.length - 1;
      const isRunning = message === running;
      return { key: isRunning ? null : keyOf(message, isLast), message, index, isLast, isRunning };
    });
    let same = 0;
    while (!isOther && views[same]?.key && views[same].key === this.#shown[same]?.key) same += 1;
    for (const { view } of this.#shown.splice(same)) view.node.remove();
    for (const { key, message, ...context } of views.slice(same)) {
      const shown = { key, message, view: viewOf(message, { ...context, messages, actions: this.#actions }) };
      this.#shown.push(shown);
      this.#container.append(shown.view.node);
    }
    this.#shownId = id;
    this.#container.classList.toggle("is-busy", Boolean(running));
    if (isOther) this.scrollToEnd();
    else this.#follow();
  }

  /** Show what a growing message has become. */
  refresh(message) {
    this.#find(message)?.view.update();
    this.#follow();
  }

  /** A message grows no more. Everything else stays where it is, as it may be what the user is reading. */
  settle(message) {
    const shown = this.#find(message);
    if (shown) {
      shown.view.settle();
      shown.key = keyOf(message, true);
    }
    this.#container.classList.remove("is-busy");
    this.#follow();
  }

  scrollToEnd() {
    this.#isAtEnd = true;
    this.#follow();
  }

  #find(message) {
    return this.#shown.findLast((each) => each.message === message);
  }

  #follow() {
    if (this.#isAtEnd) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#look();
  }

  #look() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    this.#isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    this.#jump.hidden = this.#isAtEnd;
  }
}

/** The same for messages that look the same. */
function keyOf(message, isLast) {
  return JSON.stringify([message, isLast]);
}

/** An object with a message's element, `node`; a reply can be brought up to date. */
function viewOf(message, context) {
  if (message.role === "assistant") return new ReplyView(message, context);
  return { node: message.role === "tool" ? toolResult(message, context) : question(message, context) };
}

function question(message, { index, actions }) {
  const bubble = element("div", { className: "bubble" }, message.content);
  const send = (text) => actions.edit(index, text);
  const edit = iconButton("edit", "Edit and send again", () => {
    node.replaceChildren(editForm(message.content, send, () => node.replaceChildren(bubble, bar)));
    node.querySelector("textarea").focus();
  });
  const bar = element(
    "div",
    { className: "actions" },
    copyButton("Copy message", () => message.content),
    edit,
  );
  const node = element("article", { className: "message user", "aria-label": "You" }, bubble, bar);
  edit.classList.add("when-idle");
  return node;
}

function editForm(text, edit, cancel) {
  const area = element("textarea", { value: text, rows: 1, "aria-label": "Edit the message" });
  const send = () => area.value.trim() && edit(area.value);
  growWithText(area);
  sendOnEnter(area, send);
  onKey(area, "Escape", (event) => {
    event.stopPropagation();
    cancel();
  });
  return element(
    "form",
    {
      className: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        send();
      },
    },
    area,
    element("p", { className: "note" }, "What follows this message is replaced."),
    element(
      "div",
      { className: "buttons" },
      element("button", { type: "button", className: "quiet", onclick: cancel }, "Cancel"),
      element("button", { type: "submit", className: "primary when-idle" }, "Send"),
    ),
  );
}

function toolResult(message, { messages }) {
  const calls = messages.flatMap((each) => each.toolCalls ?? []);
  const name = calls.find(({ id }) => id === message.toolCallId)?.name ?? "a tool";
  return element(
    "article",
    { className: "message tool", "aria-label": `Result of ${name}` },
    element(
      "details",
      { className: "block", open: true },
      element("summary", {}, "Result of ", element("code", {}, name)),
      element("pre", { tabIndex: 0 }, message.content),
    ),
  );
}

class ReplyView {
  #message;
  #context;
  #reasoning = element("div", { className: "markdown" });
  #reasoningTitle = element("summary");
  #reasoningBlock = element(
    "details",
    { className: "block reasoning", hidden: true },
    this.#reasoningTitle,
    this.#reasoning,
  );
  #content = element("div", { className: "markdown" });
  #calls = element("div");
  #waiting = element("div", { className: "waiting", role: "img", "aria-label": "The reply is being written" });
  #note = element("p", { className: "note", hidden: true });
  #stats = element("span", { className: "stats" });
  #bar = element("div", { className: "actions" }, this.#stats);
  #isRunning = true;
  #wasToggled = false;

  constructor(message, context) {
    this.#message = message;
    this.#context = context;
    this.#reasoningTitle.addEventListener("click", () => {
      this.#wasToggled = true;
    });
    this.node = element(
      "article",
      { className: "message assistant", "aria-label": message.model || "Reply", "aria-busy": "true" },
      [this.#reasoningBlock, this.#content, this.#calls, this.#waiting, this.#note, this.#bar],
    );
    if (context.isRunning) this.update();
    else this.settle();
  }

  /** The message grows no more. */
  settle() {
    const { content, toolCalls, error } = this.#message;
    const { isLast, actions } = this.#context;
    this.#isRunning = false;
    this.update();
    this.#waiting.remove();
    this.node.setAttribute("aria-busy", "false");
    if (isLast && toolCalls.length) this.#calls.append(resultsForm(toolCalls, actions));
    if (error) this.#note.after(errorBlock(error, this.#context));
    if (content) this.#bar.append(copyButton("Copy reply", () => content));
    if (isLast && !error) this.#bar.append(iconButton("again", "Generate again", () => actions.again()));
  }

  update() {
    const { content, reasoning, toolCalls, stats } = this.#message;
    this.#showReasoning(reasoning, content || toolCalls.length);
    renderMarkdown(this.#content, content);
    this.#showCalls(toolCalls);
    const notes = [this.#message.isContinuation && CONTINUATION, describeEnd(this.#message.finishReason)];
    this.#note.textContent = notes.filter(Boolean).join(" ");
    this.#note.hidden = !this.#note.textContent;
    if (stats) {
      this.#stats.textContent = describeStats(stats);
      this.#stats.title = describePrompt(stats);
    }
  }

  #showReasoning(text, isOver) {
    if (!text) return;
    const isThinking = this.#isRunning && !isOver;
    renderMarkdown(this.#reasoning, text);
    this.#reasoningBlock.hidden = false;
    this.#reasoningTitle.textContent = isThinking ? "Reasoning…" : "Reasoning";
    if (!this.#wasToggled) this.#reasoningBlock.open = isThinking;
  }

  #showCalls(calls) {
    calls.forEach((call, index) => {
      const node = this.#calls.children[index] ?? this.#calls.appendChild(callBlock(call));
      node.querySelector("pre").textContent = formatted(call.arguments);
    });
    while (this.#calls.children.length > calls.length) this.#calls.lastChild.remove();
  }
}

const CONTINUATION =
  "This model has no chat template, so it does not answer: it continues the text of the conversation.";

function callBlock({ name }) {
  return element(
    "details",
    { className: "block", open: true },
    element("summary", {}, "Call of ", element("code", {}, name)),
    element("pre", { tabIndex: 0 }),
  );
}

/** Arguments are JSON, once they are complete. */
function formatted(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function resultsForm(calls, actions) {
  const areas = calls.map(({ name }) =>
    element("textarea", { rows: 2, "aria-label": `Result of ${name}`, placeholder: `Result of ${name}` }),
  );
  areas.forEach(growWithText);
  const send = (event) => {
    event.preventDefault();
    actions.answerCalls(new Map(calls.map(({ id }, index) => [id, areas[index].value])));
  };
  return element(
    "form",
    { className: "edit", onsubmit: send },
    element(
      "p",
      { className: "note" },
      "This page runs no tools. Write what they would answer, and the model goes on.",
    ),
    areas,
    element(
      "div",
      { className: "buttons" },
      element("button", { type: "submit", className: "primary" }, "Send results"),
    ),
  );
}

function errorBlock({ title, detail, needsKey }, { isLast, actions }) {
  return element(
    "div",
    { className: "error", role: "alert" },
    element("strong", {}, title),
    detail && element("p", {}, detail),
    isLast &&
      element(
        "div",
        { className: "buttons" },
        needsKey &&
          element(
            "button",
            { type: "button", className: "primary", onclick: () => actions.enterKey() },
            "Enter API key",
          ),
        element(
          "button",
          { type: "button", className: "quiet", onclick: () => actions.again() },
          icon("again"),
          "Try again",
        ),
      ),
  );
}
