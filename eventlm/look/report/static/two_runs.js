// Two runs of one workload, request by request.

import { h } from "preact";
import { useMemo, useState } from "preact/hooks";
import { Card, Figures } from "./cards.js";
import { formatDuration, formatNumber } from "./format.js";
import { MEASURES } from "./overview.js";
import { linkTo } from "./place.js";
import { Notice } from "./shell.js";
import { Table } from "./table.js";

const COUNTS = { preemptions: "Preemptions", cached_tokens: "Cached tokens", output_tokens: "Output tokens" };
const QUANTILES = ["p50", "p90", "p99"];

export function TwoRuns({ found }) {
  const rows = useMemo(() => found.metrics.flatMap(metricRows), []);
  const isFew = 2 * found.numPairs < Math.min(found.a.requests, found.b.requests);
  return [
    h(
      Card,
      { title: "Two runs" },
      isFew &&
        h(Notice, { kind: "warning" }, "Fewer than half of the requests are alike: hardly two runs of one workload."),
      found.isIdentical && h("p", {}, "The runs are the same: all decisions are alike, and so are all times."),
      h(Figures, {
        figures: [
          { label: "A", value: found.a.run, note: `${formatNumber(found.a.requests)} requests` },
          { label: "B", value: found.b.run, note: `${formatNumber(found.b.requests)} requests` },
          { label: "in both", value: formatNumber(found.numPairs), note: "requests" },
          { label: "only in A", value: formatNumber(found.onlyA) },
          { label: "only in B", value: formatNumber(found.onlyB) },
        ],
      }),
      found.first && h("p", {}, h("b", {}, "First difference: "), found.first),
    ),
    h(
      Card,
      { title: "Latencies side by side" },
      h(Table, {
        caption: "Metrics of both runs",
        columns: [
          { title: "Metric", value: (row) => row.metric },
          { title: "Run", value: (row) => row.run },
          { title: "Count", value: (row) => row.count, format: formatNumber, number: true },
          ...QUANTILES.map((each) => ({ title: each, value: (row) => row[each], number: true })),
          { title: "Smaller in B", value: (row) => row.less, format: formatNumber, number: true },
          { title: "Larger in B", value: (row) => row.more, format: formatNumber, number: true },
        ],
        rows,
        empty: "No request ran to its end in both.",
      }),
    ),
    h(Largest, { found }),
    found.header.length > 0 &&
      h(
        Card,
        { title: "Set-up" },
        h(Table, {
          caption: "Settings that differ",
          columns: [
            { title: "Setting", value: (row) => row.name },
            { title: "A", value: (row) => row.a },
            { title: "B", value: (row) => row.b },
          ],
          rows: found.header,
        }),
      ),
  ];
}

/** A row for each run, and one for the differences of pairs. */
function metricRows(metric) {
  const format = metric.isTime ? formatDuration : formatNumber;
  return [
    ["A", metric.a, format],
    ["B", metric.b, format],
    ["B − A", metric.delta, (value) => signed(value, format)],
  ].map(([run, values, text]) => ({
    metric: MEASURES[metric.metric] ?? COUNTS[metric.metric],
    run,
    count: values.count,
    ...Object.fromEntries(QUANTILES.map((each) => [each, text(values[each])])),
    less: run === "B − A" ? metric.less : null,
    more: run === "B − A" ? metric.more : null,
  }));
}

/** A difference with its sign. */
function signed(value, format) {
  return value > 0 ? `+${format(value)}` : format(value);
}

function Largest({ found }) {
  const [measure, setMeasure] = useState("e2e");
  const rows = found.largest[measure];
  return h(
    Card,
    {
      title: "Largest changes",
      aside: h(
        "label",
        {},
        h("span", { class: "off-screen" }, "Latency"),
        h(
          "select",
          { value: measure, onChange: (event) => setMeasure(event.target.value) },
          Object.entries(MEASURES).map(([value, text]) =>
            h("option", { key: value, value, selected: value === measure }, text),
          ),
        ),
      ),
    },
    h(Table, {
      caption: "The requests that changed most",
      columns: [
        { title: "In A", value: (row) => row.a, format: String },
        { title: "In B", value: (row) => row.b, format: String, number: true },
        { title: "Prompt", value: (row) => row.prompt, format: formatNumber, number: true, note: "tokens" },
        { title: "A", value: (row) => row.values[measure][0], format: formatDuration, number: true },
        { title: "B", value: (row) => row.values[measure][1], format: formatDuration, number: true },
        {
          title: "B − A",
          value: (row) => row.values[measure][1] - row.values[measure][0],
          format: (value) => signed(value, formatDuration),
          number: true,
        },
      ],
      rows,
      onSelect: (row) => (location.hash = linkTo("timeline", { request: String(row.a), near: 1 })),
      empty: "Nothing changed.",
    }),
  );
}
