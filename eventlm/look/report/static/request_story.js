// One request: its figures, phases, story, and who shared its steps.

import { h } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { Card, Figures } from "./cards.js";
import { Command, linkToRequest } from "./findings.js";
import { formatDuration, formatNumber, formatShare, formatTime } from "./format.js";
import { PHASES } from "./phases.js";
import { Table } from "./table.js";

const MOST_SHARED = 10;

/** onSelect(name): the reader wants to see another request. */
export function RequestStory({ data, run, row, onSelect }) {
  const name = run.timeline.names[row];
  const story = data.stories[row];
  const phases = useMemo(() => phasesOf(run, row), [run, row]);
  const shared = useMemo(() => sharedSteps(run, row), [run, row]);
  const hasSteps = phases.some(({ steps }) => steps);
  const card = useRef(null);
  // The reader's eyes are on the timeline or the table above, which may fill the window.
  useEffect(() => card.current.scrollIntoView({ block: "nearest" }), [row]);
  const aside = h("a", { href: linkToRequest(name) }, "In the timeline");
  const shown = h(
    Card,
    { title: `Request ${name}`, aside },
    h(Figures, { figures: figuresOf(data, run, row) }),
    story
      ? [
          h("div", { class: "story" }, story.text.map((text, place) => h("p", { key: place }, text))),
          h(Parts, { parts: story.parts }),
        ]
      : h(
          "p",
          { class: "note" },
          "Why it waited, millisecond by millisecond: ",
          h(Command, { command: `eventlm explain ${quoted(data.path)} ${name}` }),
        ),
    h(
      "div",
      { class: "grid" },
      h(
        "div",
        {},
        h("h3", {}, "Phases"),
        h(Table, {
          caption: `Phases of request ${name}`,
          columns: [
            { title: "Phase", value: (each) => each.phase },
            { title: "From", value: (each) => each.start, format: (ns) => formatTime(ns), number: true },
            { title: "For", value: (each) => each.duration, format: formatDuration, number: true },
            ...(hasSteps ? [{ title: "Steps", value: (each) => each.steps, format: formatNumber, number: true }] : []),
          ],
          rows: phases,
          empty: "It was rejected, or its life is not in the log.",
        }),
      ),
      hasSteps && h(
        "div",
        {},
        h("h3", {}, "Requests in the same steps"),
        h(Table, {
          caption: `Who shared steps with request ${name}`,
          columns: [
            { title: "Request", value: (each) => each.name },
            { title: "Steps", value: (each) => each.steps, format: formatNumber, number: true },
            { title: "Share of its steps", value: (each) => each.share, format: formatShare, number: true },
          ],
          rows: shared,
          onSelect: (each) => onSelect(each.name),
          empty: "Nobody.",
        }),
      ),
    ),
  );
  return h("div", { ref: card }, shown);
}

function figuresOf(data, run, row) {
  const { requests, timeline } = run;
  const time = (name) => (requests[name][row] < 0 ? "–" : formatDuration(requests[name][row]));
  const replica = timeline.requests.replica[row];
  return [
    { label: "first token", value: time("ttft") },
    { label: "end to end", value: time("e2e") },
    { label: "in the queue", value: time("queue") },
    { label: "per output token", value: time("tpot") },
    {
      label: "prompt",
      value: formatNumber(requests.prompt[row]),
      note: `${formatNumber(requests.cached[row])} tokens cached`,
    },
    { label: "output", value: formatNumber(requests.output[row]), note: "tokens" },
    { label: "preempted", value: formatNumber(requests.preemptions[row]), note: "times" },
    { label: "end", value: data.names[requests.reason[row]] ?? "unfinished" },
    { label: "class", value: timeline.classes[timeline.requests.class[row]] },
    { label: "replica", value: replica < 0 ? "–" : String(replica), note: `priority ${requests.priority[row]}` },
  ];
}

function phasesOf({ timeline }, row) {
  const { intervals, firstInterval } = timeline;
  const found = [];
  for (let each = firstInterval[row]; each < firstInterval[row + 1]; each++) {
    const { name, inSteps } = PHASES[intervals.phase[each]];
    found.push({
      phase: name,
      start: intervals.start[each],
      duration: intervals.end[each] - intervals.start[each],
      steps: inSteps ? intervals.last[each] - intervals.first[each] + 1 : null,
    });
  }
  return found;
}

/** The requests that were in most of the steps that a request was in. */
function sharedSteps({ stretches, timeline }, row) {
  const own = [];
  let all = 0;
  for (let each = 0; each < stretches.rows; each++) {
    if (stretches.row[each] !== row) continue;
    own.push(each);
    all += stretches.last[each] - stretches.first[each] + 1;
  }
  const counts = new Map();
  for (let each = 0; each < stretches.rows; each++) {
    const other = stretches.row[each];
    if (other === row) continue;
    for (const mine of own) {
      if (stretches.replica[mine] !== stretches.replica[each]) continue;
      const first = Math.max(stretches.first[mine], stretches.first[each]);
      const last = Math.min(stretches.last[mine], stretches.last[each]);
      if (last >= first) counts.set(other, (counts.get(other) ?? 0) + last - first + 1);
    }
  }
  return [...counts]
    .sort(([one, a], [other, b]) => b - a || one - other)
    .slice(0, MOST_SHARED)
    .map(([other, steps]) => ({ name: timeline.names[other], steps, share: steps / all }));
}

/** Where its time went, the longest part first. */
function Parts({ parts }) {
  const total = parts.reduce((sum, { ns }) => sum + ns, 0) || 1;
  return h(
    "ul",
    { class: "parts", "aria-label": "Where its time went" },
    parts.map(({ label, ns }) =>
      h(
        "li",
        { key: label },
        h("span", {}, label),
        h("span", { class: "bar" }, h("span", { style: { width: `${(100 * ns) / total}%` } })),
        h("span", { class: "right" }, formatDuration(ns)),
        h("span", { class: "right" }, formatShare(ns / total)),
      ),
    ),
  );
}

/** A path as a shell takes it. */
function quoted(path) {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`;
}
