// The engine at a glance, and the last minutes as charts.

import { h } from "preact";
import { useMemo, useState } from "preact/hooks";
import { Card, Figures } from "./cards.js";
import { Chart } from "./chart.js";
import { formatDuration, formatNumber } from "./format.js";
import { PERCENTILES, rejectedIn, total } from "./frames.js";
import { backendNames, describeWait, nameOf } from "./oldest.js";

const LAST_MINUTE = 60;

export function Overview({ frames, columns, latest, oldest }) {
  // The same part of the run in all charts; all of it, and what comes, if there is none.
  const [[from, to], setZoom] = useState([null, null]);
  const zoom = { from, to, onZoom: (first, last) => setZoom([first, last]) };
  if (!latest) return h("p", { class: "note" }, "The first frame is on its way.");
  const charts = CHARTS.filter((chart) => hasWorkers(latest) || !chart.ofWorkers);
  return [
    h(Now, { key: "now", frames, columns, latest, oldest }),
    h("div", { key: "charts", class: "grid" }, charts.map((chart) => h(Panel, { key: chart.title, chart, columns, zoom }))),
  ];
}

function Now({ frames, columns, latest, oldest }) {
  const { frame } = latest;
  const minute = frames.slice(-LAST_MINUTE);
  const [tone, verdict] = stateOf(latest, oldest);
  const cached = oldest?.replicas.reduce((sum, each) => sum + each.num_cached_blocks, 0);
  const hasBackends = frame.replicas.some((each) => each.forwards);
  const head = oldest?.waiting[0];
  const inAMinute = (label, value) => ({ label, value: formatNumber(sum(minute, value)), note: "in a minute" });
  return h(
    Card,
    { title: "Now", tone, verdict },
    h(Figures, {
      figures: [
        { label: "Tokens per second", value: formatNumber(frame.generation_tokens_per_s) },
        {
          label: "Time to first token",
          value: formatDuration(columns["ttft.p50"].at(-1)),
          note: `p99 ${formatDuration(columns["ttft.p99"].at(-1))}`,
        },
        {
          label: "Running",
          value: formatNumber(frame.num_running),
          note: hasWorkers(latest) ? `${formatNumber(frame.batch_size.mean)} in a step` : "on backends",
        },
        {
          label: "Waiting",
          value: formatNumber(frame.num_waiting),
          note: head && `the oldest for ${formatDuration(head.age_ns)}`,
        },
        ...(hasWorkers(latest)
          ? [
              {
                label: "KV blocks held",
                value: percent(frame.num_held_blocks, frame.num_blocks),
                note: cached === undefined ? undefined : `${formatNumber(cached)} reusable`,
              },
              inAMinute("Preempted", ({ frame }) => total(frame.preempted)),
            ]
          : []),
        inAMinute("Rejected", rejectedIn),
        inAMinute("Deadlines missed", (each) => each.frame.num_deadlines_missed),
        ...(hasBackends ? [inAMinute("Attempts failed", failedIn)] : []),
      ],
    }),
    head &&
      h(
        "p",
        {},
        `Request ${nameOf(head)} has waited longest, ${formatDuration(head.age_ns)}: ${describeWait(head.wait, backendNames(latest))}.`,
      ),
  );
}

/** Whether it has not only backends. */
function hasWorkers({ frame }) {
  return !frame.replicas.length || frame.replicas.some((each) => !each.forwards);
}

/** Attempts at backends. */
function failedIn({ frame }) {
  return sum(frame.replicas, ({ backend }) => (backend ? total(backend.failures) : 0));
}

/** The tone of a card and the state in a word or two. */
function stateOf({ state, frame, num_front_ends, num_front_ends_up }, oldest) {
  if (state !== "ready") return [state === "dead" ? "bad" : "warning", state];
  for (const [name, all] of [
    ["replicas", frame.replicas.filter((each) => !each.forwards)],
    ["backends", frame.replicas.filter((each) => each.backend && each.backend.down_reason !== "drained")],
  ]) {
    const numDown = all.filter((each) => !each.is_up).length;
    if (numDown) return ["bad", `${numDown} of ${all.length} ${name} down`];
  }
  if (num_front_ends_up < num_front_ends) return ["warning", `${num_front_ends - num_front_ends_up} front ends down`];
  if (oldest?.paused) return ["warning", "paused"];
  return ["good", "ready"];
}

function sum(frames, value) {
  return frames.reduce((all, frame) => all + value(frame), 0);
}

function percent(part, whole) {
  return whole ? `${formatNumber(Math.round((1000 * part) / whole) / 10)}%` : "–";
}

const formatPercent = (value) => (value === null ? "–" : `${formatNumber(value)}%`);
const percentiles = (name) => PERCENTILES.map((each) => ({ label: each, column: `${name}.${each}` }));

const CHARTS = [
  {
    title: "Tokens per second",
    series: [
      { label: "Generated", column: "generated" },
      { label: "Prompt", column: "prompted" },
    ],
  },
  {
    title: "Requests per second",
    series: [
      { label: "Arrived", column: "arrived" },
      { label: "Finished", column: "finished" },
      { label: "Rejected", column: "rejected" },
    ],
  },
  { title: "Time to first token", series: percentiles("ttft"), format: formatDuration },
  { title: "Time between tokens", series: percentiles("gap"), format: formatDuration },
  { title: "Time in the queue", series: percentiles("queue"), format: formatDuration },
  { title: "Reception to the end", series: percentiles("e2e"), format: formatDuration },
  {
    title: "Sequences",
    series: [
      { label: "Running", column: "running", kind: "step" },
      { label: "Waiting", column: "waiting", kind: "step" },
    ],
  },
  {
    title: "Sequences and tokens in a step",
    ofWorkers: true,
    series: [
      { label: "Sequences", column: "batch" },
      { label: "Tokens", column: "batchTokens" },
    ],
  },
  { title: "Duration of a step", ofWorkers: true, series: percentiles("step"), format: formatDuration },
  {
    title: "KV blocks",
    ofWorkers: true,
    series: [
      { label: "Held", column: "held", kind: "area" },
      { label: "All", column: "blocks", kind: "step" },
    ],
  },
  { title: "Prompt tokens found in the cache", series: [{ label: "Hits", column: "hits" }], format: formatPercent },
  {
    title: "Preemptions per second",
    ofWorkers: true,
    series: [{ label: "Preempted", column: "preempted" }],
  },
];

function Panel({ chart, columns, zoom }) {
  const series = useMemo(
    () => chart.series.map(({ label, column, kind }) => ({ label, kind, values: columns[column] })),
    [columns],
  );
  return h(
    "section",
    { class: "card", "aria-label": chart.title },
    h(Chart, { title: chart.title, x: columns.x, series, format: chart.format, sync: "run", height: 170, ...zoom }),
  );
}
