// Every component, for the tests.

import { h } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { Card, Figures } from "./cards.js";
import { Chart } from "./chart.js";
import { unpackColumns } from "./columns.js";
import { formatBytes, formatDuration, formatNumber, formatShare, formatTime } from "./format.js";
import { linkTo, usePlace } from "./place.js";
import { FailureShown, Notice, Shell, start } from "./shell.js";
import { Table } from "./table.js";
import { Timeline } from "./timeline.js";
import { unpackTimeline } from "./timeline_model.js";

start((data) => h(Gallery, { data }));

function Gallery({ data }) {
  const tabs = [
    { name: "cards", title: "Cards", count: 2, draw: () => h(Cards, { data }) },
    { name: "table", title: data.tableTitle ?? "Requests", draw: () => h(Requests, { data }) },
    { name: "charts", title: "Charts", draw: () => h(Charts, { data }) },
    { name: "timeline", title: "Timeline", draw: () => h(Stretches, { data }) },
  ];
  if (data.failing) tabs.push({ name: "failing", title: "Failing", draw: () => h(FailureShown, {}, h(Failing)) });
  return h(Shell, {
    title: data.title,
    details: data.details,
    tabs,
    notices: h(Notice, { kind: "warning" }, data.notice),
  });
}

function Cards({ data }) {
  return h(
    "div",
    { class: "grid" },
    data.cards.map((card) =>
      h(
        Card,
        { key: card.title, ...card, aside: h("a", { href: linkTo("table", { request: 3 }) }, "See it") },
        h("p", {}, card.text),
        h(Figures, { figures: card.figures }),
      ),
    ),
  );
}

function Requests({ data }) {
  const [selected, setSelected] = useState(null);
  const [place] = usePlace();
  const columns = [
    { title: "Request", value: (row) => row.name },
    { title: "Class", value: (row) => row.kind },
    { title: "Prompt", value: (row) => row.prompt, format: formatNumber, number: true, note: "tokens" },
    { title: "First token", value: (row) => row.ttft, format: formatDuration, number: true },
    { title: "Hits", value: (row) => row.hits, format: formatShare, number: true },
  ];
  return h(
    Card,
    { title: "Slowest requests" },
    h(Table, { caption: "Requests", columns, rows: data.rows, selected, onSelect: setSelected }),
    h("p", { id: "selected" }, `${selected?.name ?? "none"} ${place.values.request ?? ""}`),
    h(Table, { caption: "No rows", columns, rows: [] }),
  );
}

function Charts({ data }) {
  const [gauges, setGauges] = useState(null);
  useEffect(() => void unpackColumns(data.gauges).then(setGauges), []);
  return gauges ? h(Panels, { data, gauges }) : h("p", {}, "Loading…");
}

function Panels({ data, gauges }) {
  const [range, setRange] = useState([null, null]);
  const [rows, setRows] = useState(gauges.rows);
  const part = useMemo(() => {
    const { time, waiting, running, free } = gauges;
    return {
      time: time.slice(0, rows),
      steps: Array.from({ length: rows }, (_, index) => index),
      lines: [
        { label: data.seriesLabel ?? "waiting", values: waiting.slice(0, rows), kind: "area" },
        { label: "running", values: running.slice(0, rows), kind: "step" },
      ],
      memory: [{ label: "free", values: free.slice(0, rows), kind: "line" }],
    };
  }, [gauges, rows]);
  const marks = useMemo(() => [{ x: 3e9, label: data.markLabel ?? "worker lost" }], []);
  const [from, to] = range;
  const shared = { x: part.time, sync: "gauges", from, to, onZoom: (...chosen) => setRange(chosen) };
  return h(
    "div",
    { class: "grid" },
    h(Card, { title: "Queue" }, h(Chart, { ...shared, title: "Requests", series: part.lines, marks })),
    h(
      Card,
      { title: "Memory" },
      h(Chart, { ...shared, title: "Free memory", series: part.memory, format: formatBytes }),
    ),
    h(Card, { title: "Steps" }, h(Chart, { title: "By step", x: part.steps, along: "counts", series: part.memory })),
    h(Card, { title: "Waits" }, h(Chart, { title: "Share", x: part.time, along: "durations", series: part.memory })),
    h(Card, { title: "Nothing" }, h(Chart, { title: "No steps", x: [], series: [{ label: "none", values: [] }] })),
    h("p", { id: "range" }, from === null ? "all" : `${formatTime(from)} to ${formatTime(to)}`),
    h("button", { type: "button", onClick: () => setRows(rows / 2) }, "Less data"),
  );
}

function Failing() {
  throw new Error("planned");
}

function Stretches({ data }) {
  const [model, setModel] = useState(null);
  const [selected, setSelected] = useState(null);
  const [range, setRange] = useState([null, null]);
  const [place] = usePlace();
  useEffect(() => void unpackTimeline(data.timeline).then(setModel), []);
  if (!model) return h("p", {}, "Loading…");
  const { from, to } = place.values;
  return h(
    Card,
    { title: "Requests" },
    h(Timeline, {
      model,
      selected,
      onSelect: setSelected,
      from: from ? Number(from) : null,
      to: to ? Number(to) : null,
      onZoom: (...zoom) => setRange(zoom),
    }),
    h("button", { type: "button", onClick: () => unpackTimeline(data.later).then(setModel) }, "More data"),
    h("p", { id: "selected-row" }, selected === null ? "none" : model.names[selected]),
    h("p", { id: "zoom" }, range[0] === null ? "all" : `${formatTime(range[0])} to ${formatTime(range[1])}`),
  );
}
