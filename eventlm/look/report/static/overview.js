// The run in figures: latencies, ends, plug-ins and settings.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { Card, Figures } from "./cards.js";
import { formatDuration, formatNumber } from "./format.js";
import { Table } from "./table.js";

/** How measures are called where there is room. */
export const MEASURES = {
  ttft: "First token (TTFT)",
  tpot: "Per output token (TPOT)",
  e2e: "End to end",
  queue: "In the queue",
};
const QUANTILES = ["mean", "p50", "p90", "p95", "p99", "max"];

export function Overview({ data }) {
  const all = useMemo(() => data.percentiles.filter((row) => row.isAll), []);
  const classes = useMemo(() => data.percentiles.filter((row) => !row.isAll), []);
  return [
    h(Card, { title: "The run" }, h(Figures, { figures: data.headline })),
    h(
      Card,
      { title: "Latencies" },
      h(Table, {
        caption: "Latencies of all sequences",
        columns: [measureColumn(), ...quantileColumns()],
        rows: all,
        empty: "No sequence got that far.",
      }),
      h("p", { class: "note" }, "Of sequences that ran to their end; first tokens of the others too."),
    ),
    classes.length > 0 &&
      h(
        Card,
        { title: "By service class" },
        h(Table, {
          caption: "Latencies by service class",
          columns: [{ title: "Class", value: (row) => row.group }, measureColumn(), ...quantileColumns()],
          rows: classes,
        }),
      ),
    h(
      "div",
      { class: "grid" },
      h(
        Card,
        { title: "How sequences ended" },
        h(Table, {
          caption: "Ends",
          columns: [
            { title: "Reason", value: (row) => row.reason },
            { title: "Sequences", value: (row) => row.count, format: formatNumber, number: true },
          ],
          rows: data.endings,
        }),
      ),
      h(
        Card,
        { title: "Plug-ins and limits" },
        h(Settings, { caption: "Plug-ins and limits", rows: data.limits }),
      ),
    ),
    h(
      Card,
      { title: "Configuration and host" },
      h(
        "details",
        {},
        h("summary", {}, `All ${formatNumber(data.settings.length)} settings`),
        h(Settings, { caption: "Configuration and host", rows: data.settings }),
      ),
    ),
  ];
}

function Settings({ caption, rows }) {
  const columns = [
    { title: "Section", value: (row) => row.section },
    { title: "Name", value: (row) => row.name },
    { title: "Value", value: (row) => row.value },
  ];
  return h(Table, { caption, columns, rows });
}

function measureColumn() {
  return { title: "Latency", value: (row) => MEASURES[row.measure] };
}

function quantileColumns() {
  const columns = [{ title: "Count", value: (row) => row.count, format: formatNumber, number: true }];
  for (const quantile of QUANTILES) {
    columns.push({ title: quantile, value: (row) => row[quantile], format: formatDuration, number: true });
  }
  return columns;
}
