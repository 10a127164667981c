// The debugger of `eventlm view`: the commands of `eventlm debug`, with buttons for those that are used most.

import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { cancelCommand, sendCommand } from "./client.js";
import { Card } from "./cards.js";
import { formatTime } from "./format.js";

const MOST_ENTRIES = 200;
/** Results of sentences, which are wrapped; columns of the others stay aligned. */
const PROSE = new Set(["text", "report"]);
const MOVES = [
  ["start", "goto start"],
  ["back step", "back step"],
  ["back drain", "back drain"],
  ["back", "back"],
  ["next", "next"],
  ["next drain", "next drain"],
  ["next step", "next step"],
  ["end", "goto end"],
];
const QUESTIONS = [
  ["queue", "show queue"],
  ["running", "show running"],
  ["pool", "show pool"],
  ["steps", "show steps"],
  ["plan", "show plan"],
  ["config", "show config"],
  ["help", "help"],
];

/**
 * session: what `useSession` gives. A command that another part of the page sends appears here too.
 */
export function Debugger({ session }) {
  const { entries, isBusy, run, stop, position, ts } = session;
  const [text, setText] = useState("");
  const [place, setPlace] = useState(null);
  const end = useRef(null);
  const typed = entries.map((entry) => entry.command);

  // Where the session is, before the first command.
  useEffect(() => {
    if (entries.length === 0) run("goto start");
  }, []);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [entries]);

  function submit(event) {
    event.preventDefault();
    if (!text.trim()) return;
    run(text.trim());
    setText("");
    setPlace(null);
  }

  function onKeyDown(event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined || typed.length === 0) return;
    event.preventDefault();
    const next = Math.min(Math.max((place ?? typed.length) + step, 0), typed.length);
    setPlace(next);
    setText(typed[next] ?? "");
  }

  return h(
    Card,
    {
      title: "Debugger",
      aside: position === null ? "" : `event ${position.toLocaleString("en")} at ${formatTime(ts)}`,
    },
    h(Buttons, { label: "Move", commands: MOVES, isBusy, run }),
    h(Buttons, { label: "Show", commands: QUESTIONS, isBusy, run }),
    h(
      "div",
      { class: "debugger-log", role: "log", "aria-label": "Answers", tabIndex: 0 },
      entries.map((entry) => h(Entry, { key: entry.number, entry })),
      h("div", { ref: end }),
    ),
    h(
      "form",
      { class: "debugger-line", onSubmit: submit },
      h("label", { for: "debugger-command" }, "Command"),
      h("input", {
        id: "debugger-command",
        value: text,
        autocomplete: "off",
        spellcheck: false,
        placeholder: "find free < 5 and running > 3",
        onInput: (event) => setText(event.currentTarget.value),
        onKeyDown,
      }),
      isBusy
        ? h("button", { type: "button", class: "quiet", onClick: stop }, "Stop")
        : h("button", { type: "submit", class: "primary" }, "Run"),
    ),
  );
}

function Buttons({ label, commands, isBusy, run }) {
  return h(
    "div",
    { class: "debugger-buttons", role: "group", "aria-label": label },
    commands.map(([title, command]) =>
      h("button", { key: command, type: "button", class: "quiet", disabled: isBusy, onClick: () => run(command) }, title),
    ),
  );
}

function Entry({ entry }) {
  return h(
    "div",
    { class: "debugger-entry" },
    h("p", { class: "debugger-asked" }, `> ${entry.command}`),
    entry.error
      ? h("pre", { class: "debugger-error" }, entry.error)
      : h("pre", { class: PROSE.has(entry.kind) ? "prose" : "" }, entry.lines === null ? "…" : entry.lines.join("\n")),
  );
}

/** The session of the page: the position, and the commands that were sent with their answers, the latest last. */
export function useSession() {
  const [state, setState] = useState({ entries: [], position: null, ts: 0, isBusy: false });
  const latest = useRef(state);
  latest.current = state;
  const number = useRef(0);
  const queue = useRef(Promise.resolve());
  const firstWanted = useRef(0);

  function change(parts) {
    latest.current = { ...latest.current, ...parts };
    setState(latest.current);
  }

  /** Run a command, after those that are under way. The answer; null if it failed or was stopped. */
  function run(command) {
    const entry = { number: number.current++, command, lines: null, kind: "", error: "" };
    change({ entries: [...latest.current.entries.slice(1 - MOST_ENTRIES), entry], isBusy: true });
    const turn = queue.current.then(() => execute(entry));
    queue.current = turn;
    return turn;
  }

  async function execute(entry) {
    let answer = null;
    if (entry.number < firstWanted.current) entry.error = "stopped";
    else {
      try {
        answer = await sendCommand(entry.command);
        entry.lines = answer.lines ?? [];
        entry.kind = answer.result?.kind ?? "";
        entry.error = answer.error?.message ?? "";
      } catch (error) {
        entry.error = error.message;
      }
    }
    const place = answer === null ? {} : { position: answer.position, ts: answer.ts };
    const isBusy = latest.current.entries.at(-1).number !== entry.number;
    change({ entries: [...latest.current.entries], isBusy, ...place });
    return answer;
  }

  /** End the command that is under way, and forget those that wait for it. */
  function stop() {
    firstWanted.current = number.current;
    return cancelCommand();
  }

  return { ...state, run, stop };
}
