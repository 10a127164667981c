// Gauges and rates over the time of the run, and of each replica.

import { h } from "preact";
import { useMemo, useState } from "preact/hooks";
import { Card } from "./cards.js";
import { Chart } from "./chart.js";
import { formatDuration, formatNumber, formatShare } from "./format.js";
import { useSeries } from "./loaded.js";
import { Table } from "./table.js";

/** More lines than that cannot be told apart. */
const MOST_REPLICAS = 12;

export function OverTime({ data }) {
  const series = useSeries(data);
  const [range, setRange] = useState([null, null]);
  const charts = useMemo(() => series && chartsOf(data.series.known, series), [series]);
  if (!series) return h("p", {}, "Loading…");
  return h(
    "div",
    { class: "grid" },
    data.series.marksLeftOut > 0 &&
      h("p", { class: "note" }, `${formatNumber(data.series.marksLeftOut)} later marks are in the timeline only.`),
    charts.map(({ card, ...chart }) =>
      h(
        Card,
        { key: card, title: card },
        h(Chart, {
          ...chart,
          marks: data.series.marks,
          sync: "run",
          from: range[0],
          to: range[1],
          onZoom: (...chosen) => setRange(chosen),
        }),
      ),
    ),
  );
}

/** What `Chart` takes, with the title of the card. Gauges that the index does not have are left out. */
function chartsOf(known, { gauges, rates }) {
  const gauge = (label, name, kind = "step") => known.includes(name) && { label, values: gauges[name], kind };
  const rate = (label, name, scale = 1) =>
    rates[name].some((value) => value >= 0) && { label, values: valuesOf(rates[name], scale), kind: "step" };
  const of = (card, title, x, lines, format) => ({ card, title, x, series: lines.filter(Boolean), format });
  return [
    of("Queue", "Sequences", gauges.time, [
      gauge("waiting", "waiting", "area"),
      gauge("running", "running"),
      gauge("half a prompt done", "partial"),
    ]),
    of("KV cache", "Blocks", gauges.time, [
      gauge("free", "free"),
      gauge("held", "held", "area"),
      gauge("cached, held by nobody", "cached"),
    ]),
    of("Throughput", "Tokens a second", rates.time, [rate("output", "output"), rate("prompt", "prompt")]),
    of("Batches", "Sequences in a step, mean", rates.time, [rate("sequences", "batch", 100)]),
    of("Steps", "Tokens in a step, mean", rates.time, [rate("tokens", "batch_tokens", 100)]),
    of("Time of a step", "Mean", rates.time, [rate("time", "step")], formatDuration),
    of("Prefix cache", "Share of prompt tokens found", rates.time, [rate("hits", "hit_ppm", 1e6)], formatHits),
    of("Arrivals and losses", "Count in each stretch of time", rates.time, [
      rate("arrivals", "arrivals"),
      rate("preemptions", "preemptions"),
      rate("failed attempts", "failures"),
      rate("rejections", "rejections"),
    ]),
  ].filter((chart) => chart.series.length > 0);
}

function formatHits(value) {
  return value === null || value === undefined ? "–" : formatShare(value);
}

/** Null where there is no value. */
function valuesOf(column, scale) {
  return Array.from(column, (value) => (value < 0 ? null : value / scale));
}

export function Replicas({ data }) {
  const columns = [
    { title: "Replica", value: (row) => row.replica, format: String },
    ...(data.replicas.some((row) => row.model) ? [{ title: "Model", value: (row) => row.model }] : []),
    { title: "Sequences", value: (row) => row.sequences, format: formatNumber, number: true, note: "that it had last" },
    { title: "Steps", value: (row) => row.steps, format: formatNumber, number: true },
    { title: "Busy", value: (row) => row.busyPpm / 1e6, format: formatShare, number: true },
    { title: "Batch", value: (row) => row.batch, format: formatNumber, number: true, note: "sequences, mean" },
    { title: "Step", value: (row) => row.stepNs, format: formatDuration, number: true, note: "mean" },
    { title: "Output", value: (row) => row.output, format: formatNumber, number: true, note: "tokens" },
    { title: "Hits", value: (row) => row.hitPpm && row.hitPpm / 1e6, format: formatHits, number: true, note: "of their prompts" },
    { title: "Waiting", value: (row) => row.waiting, format: formatNumber, number: true, note: "mean" },
    { title: "Running", value: (row) => row.running, format: formatNumber, number: true, note: "mean" },
    { title: "Preempted", value: (row) => row.preemptions, format: formatNumber, number: true },
    { title: "Lost", value: (row) => row.lost, format: formatNumber, number: true, note: "workers" },
  ];
  return [
    data.replicas.length > 0 &&
      h(Card, { title: "Replicas" }, h(Table, { caption: "Replicas", columns, rows: data.replicas })),
    data.backends.length > 0 && h(Backends, { rows: data.backends }),
    data.stages.length > 0 && h(Stages, { rows: data.stages }),
    data.kvGroups.length > 0 && h(KvGroups, { rows: data.kvGroups }),
    data.series.numReplicas > 1 && h(ReplicaCharts, { data }),
  ];
}

function Backends({ rows }) {
  const count = (title, value, note) => ({ title, value, format: formatNumber, number: true, note });
  const duration = (title, value, note) => ({ title, value, format: formatDuration, number: true, note });
  const columns = [
    { title: "Backend", value: (row) => row.replica, format: String },
    { title: "Address", value: (row) => row.backend || "–" },
    count("Attempts", (row) => row.attempts),
    count("Answered", (row) => row.answered),
    count("Failed", (row) => row.failed),
    { title: "Failures", value: (row) => row.failures || "–", note: "by kind" },
    count("Retries", (row) => row.retries, "after failures here"),
    count("Hedges", (row) => row.hedges, "sent here"),
    count("Withdrawn", (row) => row.withdrawn, "another was faster"),
    duration("TTFT p50", (row) => row.ttftP50, "there, from the sending"),
    duration("TTFT p99", (row) => row.ttftP99, "there"),
    count("Output", (row) => row.output, "tokens"),
    { title: "Hits", value: (row) => row.hitPpm && row.hitPpm / 1e6, format: formatHits, number: true },
    count("Running", (row) => row.running, "mean"),
    count("Limit", (row) => row.limit, "the highest"),
    count("Down", (row) => row.downs, "times"),
  ];
  return h(Card, { title: "Backends" }, h(Table, { caption: "Backends", columns, rows }));
}

function Stages({ rows }) {
  const duration = (title, value, note) => ({ title, value, format: formatDuration, number: true, note });
  const columns = [
    { title: "Replica", value: (row) => row.replica, format: String },
    { title: "Stage", value: (row) => row.stage, format: String },
    { title: "Busy", value: (row) => row.busyPpm / 1e6, format: formatShare, number: true },
    duration("Step", (row) => row.stepNs, "in the stage, mean"),
    duration("Waiting", (row) => row.waitNs, "of a step while the stage has another, mean"),
    duration("Exchange", (row) => row.exchangeNs, "the rest of its way from the stage before, mean"),
  ];
  return h(Card, { title: "Stages" }, h(Table, { caption: "Stages", columns, rows }));
}

function KvGroups({ rows }) {
  const columns = [
    { title: "Replica", value: (row) => row.replica, format: String },
    { title: "KV group", value: (row) => row.group, format: String },
    { title: "Steps", value: (row) => row.steps, format: formatNumber, number: true, note: "that it has a part in" },
    { title: "Tokens", value: (row) => row.tokens, format: formatNumber, number: true, note: "that it computed" },
    { title: "Share", value: (row) => row.sharePpm / 1e6, format: formatShare, number: true },
  ];
  return h(Card, { title: "KV groups" }, h(Table, { caption: "KV groups", columns, rows }));
}

function ReplicaCharts({ data }) {
  const series = useSeries(data);
  const [range, setRange] = useState([null, null]);
  const count = Math.min(data.series.numReplicas, MOST_REPLICAS);
  const lines = useMemo(() => {
    const of = (name) =>
      Array.from({ length: count }, (_, replica) => ({
        label: `replica ${replica}`,
        values: series.gauges[`${name}.${replica}`],
        kind: "step",
      }));
    return series && { waiting: of("waiting"), running: of("running") };
  }, [series]);
  if (!series) return h("p", {}, "Loading…");
  const shared = {
    x: series.gauges.time,
    marks: data.series.marks,
    sync: "replicas",
    from: range[0],
    to: range[1],
    onZoom: (...chosen) => setRange(chosen),
  };
  return h(
    "div",
    { class: "grid" },
    h(Card, { title: "Queues" }, h(Chart, { ...shared, title: "Sequences that wait", series: lines.waiting })),
    h(Card, { title: "Loads" }, h(Chart, { ...shared, title: "Sequences that run", series: lines.running })),
    data.series.numReplicas > count && h("p", { class: "note" }, `The first ${count} of ${data.series.numReplicas}.`),
  );
}
