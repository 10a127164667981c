// Lines over a shared axis, drawn by uPlot. The legend, the keyboard and the readout are our own.

import { h } from "preact";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import {
  BYTE_TICKS,
  COUNT_TICKS,
  formatBytes,
  formatDuration,
  formatNumber,
  formatTime,
  TIME_TICKS,
} from "./format.js";
import { resolveColours, useTheme } from "./theme.js";

const SERIES_COLOURS = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6"];
/** What x can be, with ticks and texts. */
const AXES = {
  time: { ticks: TIME_TICKS, formatX: formatTime },
  durations: { ticks: TIME_TICKS, formatX: (value) => formatDuration(value) },
  counts: { ticks: COUNT_TICKS, formatX: (value) => formatNumber(value) },
};
/** With the colours, so that lines differ without them. */
const DASHES = [[], [6, 3], [2, 2], [10, 3, 2, 3], [4, 6], [1, 4]];
// One array, as a new one would be drawn again.
const NO_MARKS = [];
const PLAIN_COLOURS = ["line", "text", "muted", "danger"];

/**
 * A chart.
 *
 * title: what it shows, with its unit. x: ascending, one for each value. along: what they are: "time" in ns from the
 * start of the run, "durations" in ns, or "counts", such as steps. series: [{label, values, kind}], where values are
 * numbers or null, and kind is "line", "step" (each value holds until the next) or "area" (a filled step).
 * format(value): of all values. marks: [{x, label}], vertical lines. sync: charts with the same text show the cursor at
 * the same x. from, to: the part of x that is shown, all by default; onZoom(from, to): the reader chose another, or all
 * (nulls). Arrays are compared by identity: keep them in `useMemo`, so that they are not drawn again for nothing.
 */
export function Chart({ title, ...rest }) {
  const id = useId();
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", { id }, title),
    rest.x.length ? h(Plot, { ...rest, titleId: id }) : h("p", { class: "note" }, "There is nothing to show."),
  );
}

function Plot({
  titleId,
  x,
  along = "time",
  series,
  format = formatNumber,
  marks = NO_MARKS,
  sync,
  from,
  to,
  onZoom,
  height = 200,
}) {
  const { dark } = useTheme();
  const id = useId();
  const box = useRef(null);
  const plot = useRef(null);
  const [hidden, setHidden] = useState(new Set());
  const [cursor, setCursor] = useState(null);
  // Also there before the next drawing, for keys that follow fast.
  const latest = useRef(null);
  const [spoken, setSpoken] = useState("");
  const { formatX } = AXES[along];
  // What the chart calls must be the latest, not that of when it was made.
  const zoomed = useRef(onZoom);
  zoomed.current = onZoom;
  const latestMarks = useRef(marks);
  latestMarks.current = marks;
  const shape = series.map(({ label, kind }) => `${kind} ${label}`).join("\n");

  useEffect(() => {
    const colours = resolveColours(...SERIES_COLOURS, ...PLAIN_COLOURS);
    const options = plotOptions({ along, series, format, sync, height, colours, width: box.current.clientWidth });
    options.hooks.draw = [(u) => drawMarks(u, latestMarks.current, colours)];
    options.series.forEach((each, number) => number && (each.show = !hidden.has(number - 1)));
    options.hooks.setCursor = [(u) => point(u.cursor.idx ?? null)];
    options.hooks.setSelect = [
      (u) => {
        if (u.select.width > 3) {
          const start = u.posToVal(u.select.left, "x");
          zoomed.current?.(start, u.posToVal(u.select.left + u.select.width, "x"));
        }
      },
    ];
    const made = new uPlot(options, [x, ...series.map((each) => each.values)], box.current);
    made.over.addEventListener("dblclick", () => zoomed.current?.(null, null));
    plot.current = made;
    show(from, to);
    const watcher = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width > 0 && width !== made.width) made.setSize({ width, height });
    });
    watcher.observe(box.current);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape, dark, along, height, sync]);

  // More values, as from a run that goes on, need no new chart.
  useEffect(() => {
    plot.current.setData([x, ...series.map((each) => each.values)], false);
    show(from, to);
    plot.current.redraw(false);
  }, [x, series, marks]);

  // At once, so that a key that follows fast starts from there.
  useLayoutEffect(() => {
    if (plot.current) show(from, to);
  }, [from, to]);

  function show(start, end) {
    const first = start ?? x[0];
    plot.current.setScale("x", { min: first, max: Math.max(end ?? x[x.length - 1], first + 1) });
  }

  function point(index) {
    latest.current = index;
    setCursor(index);
  }

  function toggle(number) {
    const next = new Set(hidden);
    if (!next.delete(number)) next.add(number);
    setHidden(next);
    plot.current.setSeries(number + 1, { show: !next.has(number) });
  }

  function readout(index) {
    const values = series.map((each, number) =>
      hidden.has(number) ? "" : `${each.label} ${format(each.values[index])}`,
    );
    return `${formatX(x[index])}: ${values.filter(Boolean).join(", ")}`;
  }

  function zoomBy(factor) {
    const { min, max } = plot.current.scales.x;
    const middle = latest.current === null ? (min + max) / 2 : x[latest.current];
    const first = Math.max(x[0], middle - (middle - min) * factor);
    const last = Math.min(x[x.length - 1], middle + (max - middle) * factor);
    plot.current.setScale("x", { min: first, max: Math.max(last, first + 1) });
    zoomed.current?.(first, last);
  }

  function onKeyDown(event) {
    const step = event.shiftKey ? 20 : 1;
    const current = latest.current ?? -1;
    const moves = { ArrowLeft: current - step, ArrowRight: current + step };
    if (event.key in moves) {
      const [first, last] = plot.current.series[0].idxs;
      const index = Math.min(last, Math.max(first, moves[event.key]));
      const top = plot.current.over.clientHeight / 2;
      // With the hook, and to the charts beside it.
      plot.current.setCursor({ left: plot.current.valToPos(x[index], "x"), top }, true, true);
      point(index);
      setSpoken(readout(index));
    } else if (event.key === "+" || event.key === "=") {
      zoomBy(0.5);
    } else if (event.key === "-") {
      zoomBy(2);
    } else if (event.key === "Home") {
      show(null, null);
      zoomed.current?.(null, null);
    } else {
      return;
    }
    event.preventDefault();
  }

  return [
    h("div", {
      class: "plot",
      ref: box,
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "chart",
      "aria-labelledby": titleId,
      "aria-describedby": `${id}-help`,
      onKeyDown,
    }),
    h(
      "div",
      { class: "legend" },
      series.map((each, number) =>
        h(
          "button",
          {
            key: each.label,
            type: "button",
            class: "key",
            "aria-pressed": String(!hidden.has(number)),
            title: hidden.has(number) ? "Show" : "Hide",
            onClick: () => toggle(number),
          },
          h(Line, { number }),
          h("span", {}, each.label),
          h("b", {}, cursor === null ? "" : format(each.values[cursor])),
        ),
      ),
      h("span", { class: "at" }, cursor === null ? "" : formatX(x[cursor])),
    ),
    h(
      "p",
      { class: "off-screen", id: `${id}-help` },
      "Arrows read values, with Shift in larger steps; plus and minus zoom; Home shows all.",
    ),
    h("p", { class: "off-screen", role: "status" }, spoken),
  ];
}

/** A piece of a series' line, for the legend. */
function Line({ number }) {
  const stroke = `var(--${SERIES_COLOURS[number % SERIES_COLOURS.length]})`;
  return h(
    "svg",
    { width: 24, height: 10, "aria-hidden": "true" },
    h("line", {
      x1: 1,
      x2: 23,
      y1: 5,
      y2: 5,
      style: { stroke, strokeWidth: 2.5, strokeDasharray: DASHES[number % 6].join(" ") },
    }),
  );
}

function plotOptions({ along, series, format, sync, height, colours, width }) {
  const axis = {
    stroke: colours.muted,
    grid: { stroke: colours.line, width: 1 },
    ticks: { stroke: colours.line, width: 1, size: 4 },
    font: "12px system-ui, sans-serif",
  };
  return {
    width: Math.max(width, 100),
    height,
    legend: { show: false },
    cursor: {
      sync: sync ? { key: sync } : undefined,
      y: false,
      drag: { x: true, y: false },
      points: { size: 7 },
    },
    scales: { x: { time: false }, y: { range: (u, low, high) => valueRange(low, high) } },
    axes: [
      {
        ...axis,
        size: 32,
        incrs: AXES[along].ticks,
        space: 70,
        values: (u, ticks) => ticks.map((tick) => AXES[along].formatX(tick, ticks[1] - ticks[0] || undefined)),
      },
      {
        ...axis,
        incrs: format === formatBytes ? BYTE_TICKS : undefined,
        size: (u, texts) => Math.max(44, 14 + 7 * Math.max(0, ...(texts ?? []).map((text) => text.length))),
        values: (u, ticks) => ticks.map(format),
      },
    ],
    series: [
      {},
      ...series.map((each, number) => {
        const stroke = colours[SERIES_COLOURS[number % SERIES_COLOURS.length]];
        return {
          label: each.label,
          stroke,
          width: 1.75,
          dash: DASHES[number % DASHES.length],
          fill: each.kind === "area" ? stroke.replace("rgb(", "rgba(").replace(")", ", 0.18)") : undefined,
          paths: each.kind === "line" || !each.kind ? uPlot.paths.linear() : uPlot.paths.stepped({ align: 1 }),
          points: { show: (u) => u.data[0].length < 2 },
        };
      }),
    ],
    hooks: {},
  };
}

/** From 0, unless values are below it, to a little above the highest. */
function valueRange(low, high) {
  if (low === null || high === null) return [0, 1];
  const least = Math.min(0, low);
  return [least, high === least ? least + 1 : high + (high - least) * 0.06];
}

function drawMarks(u, marks, colours) {
  const { left, top, height, width } = u.bbox;
  u.ctx.save();
  u.ctx.strokeStyle = colours.danger;
  u.ctx.fillStyle = colours.danger;
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  u.ctx.textBaseline = "top";
  for (const mark of marks) {
    const at = Math.round(u.valToPos(mark.x, "x", true)) + 0.5;
    if (at < left || at > left + width) continue;
    const leans = at > left + width * 0.75;
    u.ctx.textAlign = leans ? "right" : "left";
    u.ctx.beginPath();
    u.ctx.moveTo(at, top);
    u.ctx.lineTo(at, top + height);
    u.ctx.stroke();
    if (mark.label) u.ctx.fillText(mark.label, at + (leans ? -4 : 4) * devicePixelRatio, top + 2);
  }
  u.ctx.restore();
}
