// What other policies would have done with the run's work.

import { h } from "preact";
import { Card, Figures } from "./cards.js";
import { formatDuration, formatNumber, formatShare } from "./format.js";
import { MEASURES } from "./overview.js";
import { Table } from "./table.js";

const FORMATS = { ns: formatDuration, ppm: (value) => formatShare(value / 1e6) };

export function WhatIf({ found }) {
  return [
    h(
      Card,
      { title: "What if" },
      h(
        "p",
        {},
        "The recorded requests, served by an engine with another policy. ± is the error of a value; a difference from ",
        "the simulated baseline that is smaller than its error is marked as no difference. Latencies are those of requests ",
        "that ran to their end; the overview also counts the first tokens of those that were cut short.",
      ),
      h(Metrics, { found }),
      found.notes.map((note) => h("p", { key: note, class: "note" }, note)),
    ),
    h(
      "div",
      { class: "grid" },
      found.wonLost.map((counts, place) =>
        h(
          Card,
          { key: place, title: found.names[place] },
          h(Figures, {
            figures: [
              { label: "faster", value: formatNumber(counts.won), note: "requests, by more than the error" },
              { label: "slower", value: formatNumber(counts.lost), note: "requests" },
              { label: "alike", value: formatNumber(counts.equal), note: "requests" },
              { label: "not compared", value: formatNumber(counts.censored), note: "requests" },
            ],
          }),
        ),
      ),
    ),
  ];
}

function Metrics({ found }) {
  const rows = found.metrics.map((metric) => {
    const format = FORMATS[metric.unit] ?? formatNumber;
    const text = (value, bar) =>
      value === null ? "–" : `${format(value)}${bar === null || bar === undefined ? "" : ` ± ${format(bar)}`}`;
    return { metric, text };
  });
  return h(Table, {
    caption: "Metrics of the recorded run and of the alternatives",
    rows,
    columns: [
      { title: "Metric", value: ({ metric }) => nameOf(metric) },
      { title: "Recorded", value: ({ metric, text }) => text(metric.recorded, null), number: true },
      {
        title: "Simulated",
        note: "the same engine, for comparison",
        value: ({ metric, text }) => text(metric.baseline, metric.bar),
        number: true,
      },
      ...found.names.flatMap((title, place) => [
        { title, value: ({ metric, text }) => text(metric.cells[place].value, metric.cells[place].bar), number: true },
        { title: `${title}: verdict`, value: ({ metric }) => verdict(metric, metric.cells[place]) },
      ]),
    ],
  });
}

/** `First token (TTFT) p50`, as other tabs call it. */
function nameOf({ name }) {
  const [measure, ...rest] = name.split("_");
  return [MEASURES[measure] ?? measure, ...rest].join(" ");
}

function verdict(metric, { difference, isSignificant }) {
  if (difference === null) return "–";
  if (!isSignificant) return "no difference";
  return difference < 0 === (metric.better === "lower") ? "better" : "worse";
}
