// The timeline: a row for each request, a colour and a pattern for each phase, from the whole run to one step.

import { h } from "preact";
import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { formatDuration, formatNumber, formatTime } from "./format.js";
import { MARKS, PATTERN_SIZE, PHASE_COLOURS, phasePixels, PHASES, LEVELS } from "./phases.js";
import { resolveColours, useTheme } from "./theme.js";
import { describeLanes, drawLanes, heightOfLanes } from "./timeline_lanes.js";
import { orderRows, whatIsAt } from "./timeline_model.js";
import { BOTTOM, drawCursor, drawOverlay, gutterOf, TOP } from "./timeline_overlay.js";
import { paint } from "./timeline_raster.js";
import { between, EDGES, fitted, kept, moved, showing, spanning, wholeView, zoomed } from "./timeline_view.js";

const ORDERS = ["arrival", "replica", "class", "slot"];
const PLAIN_COLOURS = ["line", "field", "text", "muted", "accent", "danger", "raised"];
/** A pointer that moved less, in pixels, has clicked. */
const CLICK_DISTANCE = 4;
/** In pixels, of the row of a request that somebody was led to. */
const SEEN_HEIGHT = 8;
/** By how much a notch of a wheel zooms. */
const NOTCH = 1.25;
const HELP =
  "Arrows move the cursor, with Shift in larger steps; plus and minus zoom, period and comma in time only; F fits the" +
  " rows to the time; Page Up and Page Down turn pages; Home shows the whole run; Enter selects the request, Escape" +
  " none. A wheel zooms, with Shift in time only; a drag moves, with Shift it zooms to a stretch.";

/**
 * The timeline of a model that `unpackTimeline` gave.
 *
 * selected: a request's row in the data, or null; it is brought into view when it changes. onSelect(row or null).
 * from, to: a stretch in ns to show, with the rows of what happened in it; null: as it is. onZoom(from, to): what is
 * shown, after the reader has changed it. A model that has grown is shown where the last one was.
 */
export function Timeline({ model, selected = null, onSelect, from = null, to = null, onZoom, height = 480 }) {
  const { dark } = useTheme();
  const id = useId();
  const [by, setBy] = useState("arrival");
  const [unit, setUnit] = useState("time");
  const [said, setSaid] = useState("");
  const [saidOfLanes, setSaidOfLanes] = useState("");
  const box = useRef(null);
  const laneCanvas = useRef(null);
  const scene = useRef(null);
  const axis = model.axes[unit];
  // Stages have several steps at a time.
  const lanes = unit === "time" ? model.lanes : null;
  const order = useMemo(() => orderRows(model, by), [model, by]);

  // Before the first drawing: all that the handlers below need lives in the scene, which is not drawn by Preact.
  if (scene.current === null) scene.current = new Scene();
  const live = scene.current;
  live.onSelect = onSelect;
  live.onZoom = onZoom;
  live.onSay = setSaid;
  live.onSayOfLanes = setSaidOfLanes;
  live.laneCanvas = laneCanvas;

  useEffect(() => live.attach(box.current, height), [height]);
  useEffect(() => live.show({ model, order, axis, by, unit }), [model, order, axis]);
  useEffect(() => live.paintIn(resolveColours(...PHASE_COLOURS, ...PLAIN_COLOURS)), [dark]);
  useEffect(() => live.select(selected), [selected, order, axis]);
  useEffect(() => {
    if (from !== null && to !== null && unit === "time") live.spanTo(from, to);
  }, [from, to, unit, model]);

  return h(
    "div",
    { class: "timeline" },
    h(
      "div",
      { class: "tools" },
      h(Choice, { label: "Order by", value: by, options: ORDERS, onChange: setBy }),
      model.steps.rows > 0 &&
        h(Choice, { label: "Along", value: unit, options: ["time", "steps"], onChange: setUnit }),
      h(
        "span",
        { class: "buttons" },
        h("button", { type: "button", class: "quiet", onClick: () => live.zoomBy(1 / 2, 1 / 2) }, "Zoom in"),
        h("button", { type: "button", class: "quiet", onClick: () => live.zoomBy(2, 2) }, "Zoom out"),
        h("button", { type: "button", class: "quiet", onClick: () => live.fitRows() }, "Fit rows"),
        h("button", { type: "button", class: "quiet", onClick: () => live.home() }, "Whole run"),
      ),
    ),
    h(Legend, { dark, model }),
    lanes &&
      h(
        "div",
        {
          class: "lanes",
          role: "img",
          "aria-label": `${labelOf(lanes)} of ${lanes.names.filter(Boolean).join(", ")}`,
          style: { height: `${heightOfLanes(lanes)}px` },
          onPointerMove: (event) => live.onPointerOverLanes(event),
          onPointerLeave: () => live.onPointerLeave(),
        },
        h("canvas", { ref: laneCanvas, "aria-hidden": "true" }),
        h("i", { hidden: true }),
      ),
    h(
      "div",
      {
        class: "stage",
        ref: box,
        tabIndex: 0,
        role: "application",
        "aria-roledescription": "timeline",
        "aria-label": "Timeline of requests",
        "aria-describedby": `${id}-help`,
        style: { height: `${height}px` },
        onKeyDown: (event) => live.onKey(event),
        onPointerDown: (event) => live.onPointerDown(event),
        onPointerMove: (event) => live.onPointerMove(event),
        onPointerUp: (event) => live.onPointerUp(event),
        onPointerCancel: (event) => live.onPointerUp(event, true),
        onPointerLeave: () => live.onPointerLeave(),
        onFocus: () => live.onFocus(),
      },
      h("canvas", { "aria-hidden": "true" }),
      h("canvas", { class: "over", "aria-hidden": "true" }),
    ),
    h("p", { class: "readout", role: "status" }, said),
    lanes && h("p", { class: "readout of-lanes", role: "status" }, saidOfLanes),
    h("p", { class: "note", id: `${id}-help` }, HELP),
  );
}

function Choice({ label, value, options, onChange }) {
  return h(
    "label",
    {},
    h("span", { class: "note" }, label),
    h(
      "select",
      { value, onChange: (event) => onChange(event.target.value) },
      options.map((each) => h("option", { key: each, value: each, selected: each === value }, each)),
    ),
  );
}

/** What lanes have. */
function labelOf({ nouns }) {
  return nouns[0] === "step" ? "Steps" : "Requests";
}

function Legend({ dark, model }) {
  const list = useRef(null);
  const phases = useMemo(() => occurring(PHASES, model.intervals.phase, model.lanes?.phases), [model]);
  const marks = useMemo(() => occurring(MARKS, model.marks.kind), [model]);
  useEffect(() => {
    const pixels = phasePixels(resolveColours(...PHASE_COLOURS, ...PLAIN_COLOURS));
    const canvases = list.current.querySelectorAll("canvas");
    canvases.forEach((canvas, number) => drawSwatch(canvas, pixels, PHASES.indexOf(phases[number])));
  }, [dark, phases]);
  return h(
    "ul",
    { class: "legend", ref: list, "aria-label": "Legend" },
    phases.map(({ name }) =>
      h("li", { key: name }, h("canvas", { width: 24, height: 12, "aria-hidden": "true" }), name),
    ),
    marks.map(({ name, glyph }) => h("li", { key: `mark ${name}` }, h("b", { "aria-hidden": "true" }, glyph), name)),
  );
}

/** Those whose codes are in a column, or among others. */
function occurring(all, codes, others = []) {
  const found = new Set(codes);
  for (const code of others) found.add(code);
  return all.filter((_, code) => found.has(code));
}

function drawSwatch(canvas, pixels, phase) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const out = new Uint32Array(image.data.buffer);
  const tile = (phase * LEVELS + LEVELS - 1) * PATTERN_SIZE * PATTERN_SIZE;
  for (let at = 0; at < out.length; at++) {
    const x = at % canvas.width;
    const y = Math.floor(at / canvas.width);
    out[at] = pixels[tile + (y % PATTERN_SIZE) * PATTERN_SIZE + (x % PATTERN_SIZE)];
  }
  context.putImageData(image, 0, 0);
}

/** The canvases, what they show, and what the reader does with them. Drawn once a frame at most. */
class Scene {
  view = null;
  shown = null;
  pixels = null;
  colours = null;
  selected = null;
  /** Where the reader is, in units of the axis and rows. */
  cursor = null;
  drag = null;
  told = null;
  frame = 0;
  timer = 0;

  attach(box, height) {
    this.box = box;
    [this.base, this.over] = box.querySelectorAll("canvas");
    this.height = height;
    const resize = () => {
      this.width = Math.max(120, box.clientWidth);
      this.draw();
    };
    const watcher = new ResizeObserver(resize);
    watcher.observe(box);
    const onWheel = (event) => this.onWheel(event);
    box.addEventListener("wheel", onWheel, { passive: false });
    resize();
    return () => {
      watcher.disconnect();
      box.removeEventListener("wheel", onWheel);
      cancelAnimationFrame(this.frame);
      clearTimeout(this.timer);
    };
  }

  /** In another order or along another axis from the beginning, but where it was if the data have grown. */
  show(shown) {
    const before = this.shown;
    this.shown = shown;
    if (before?.by === shown.by && before.unit === shown.unit) {
      this.view = kept(this.view, before, shown);
    } else {
      this.view = wholeView(shown.axis, shown.order);
      this.cursor = null;
    }
    this.draw();
  }

  paintIn(colours) {
    this.colours = colours;
    this.pixels = phasePixels(colours);
    this.draw();
  }

  select(request) {
    this.selected = request;
    if (request !== null) {
      const { model, order, axis } = this.shown;
      const first = model.firstInterval[request];
      const x = first < model.firstInterval[request + 1] ? axis.start[first] : model.requests.arrived[request];
      this.view = showing(this.view, axis, order, x, order.rowOf[request]);
      this.say(x, order.rowOf[request] + 0.5);
    }
    this.draw();
  }

  spanTo(from, to) {
    const { axis, order } = this.shown;
    // What it said itself comes back when the reader may be elsewhere already.
    if (this.told?.from === from && this.told?.to === to) return;
    const view = spanning(this.view, axis, order, from, to);
    this.view = fitted(view, axis, order, this.shown.model.firstInterval);
    if (this.selected !== null) this.spread(order.rowOf[this.selected]);
    this.draw();
  }

  /** Fewer rows, if one of them is too thin to be seen. */
  spread(row) {
    const { axis, order } = this.shown;
    const rows = this.view.y1 - this.view.y0;
    const most = this.size.height / SEEN_HEIGHT;
    if (rows <= most) return;
    const x = (this.view.x0 + this.view.x1) / 2;
    this.view = zoomed(this.view, axis, order, x, row + 0.5, 1, most / rows);
    this.view = showing(this.view, axis, order, x, row);
  }

  get size() {
    const left = gutterOf(this.width);
    return { left, width: this.width - left, height: this.height - TOP - BOTTOM };
  }

  // Drawing.

  draw() {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    this.frame = 0;
    if (!this.shown || !this.colours || !this.width) return;
    const begun = performance.now();
    const { size, width, height, view, shown } = this;
    const scale = Math.min(2, devicePixelRatio || 1);
    for (const canvas of [this.base, this.over]) {
      if (canvas.width === Math.round(width * scale) && canvas.height === Math.round(height * scale)) continue;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const context = this.base.getContext("2d");
    const wide = Math.max(1, Math.round(size.width * scale));
    const high = Math.max(1, Math.round(size.height * scale));
    if (this.image?.width !== wide || this.image?.height !== high) this.image = context.createImageData(wide, high);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.base.width, this.base.height);
    paint(this.image, shown.model, shown.order, shown.axis, view, this.pixels, scale);
    context.putImageData(this.image, Math.round(size.left * scale), Math.round(TOP * scale));
    context.setTransform(scale, 0, 0, scale, 0, 0);
    drawOverlay(context, { ...shown, colours: this.colours, selected: this.selected }, view, size);
    const lanes = this.laneCanvas.current;
    if (lanes) drawLanes(lanes, shown.model.lanes, view, size, { colours: this.colours, pixels: this.pixels, scale });
    this.drawOver();
    performance.measure("timeline", { start: begun, end: performance.now() });
  }

  drawOver() {
    const context = this.over.getContext("2d");
    const scale = this.over.width / this.width;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const { size, drag, view } = this;
    if (drag?.marks) {
      context.fillStyle = this.colours.accent;
      context.globalAlpha = 0.2;
      context.fillRect(Math.min(drag.startX, drag.x), TOP, Math.abs(drag.x - drag.startX), size.height);
      context.globalAlpha = 1;
    }
    const line = this.laneCanvas.current?.nextElementSibling;
    if (line) line.hidden = true;
    if (!this.cursor) return;
    const x = size.left + ((this.cursor.x - view.x0) / (view.x1 - view.x0)) * size.width;
    if (line && x >= size.left && x <= this.width) {
      line.hidden = false;
      line.style.left = `${x}px`;
    }
    const y = TOP + ((this.cursor.y - view.y0) / (view.y1 - view.y0)) * size.height;
    if (x >= size.left && x <= this.width && y >= TOP && y <= TOP + size.height) {
      drawCursor(context, this.colours, size, x, y);
    }
  }

  // What is at a place, in words.

  at(x, y) {
    const { model, order, axis } = this.shown;
    const perPixel = (this.view.x1 - this.view.x0) / this.size.width;
    const rows = Math.max(1, (this.view.y1 - this.view.y0) / this.size.height);
    const first = between(Math.floor(y), 0, Math.max(0, order.rows - 1));
    const end = between(Math.floor(y + (rows > 1 ? rows : 0)), first + 1, Math.max(order.rows, 1));
    if (y < 0 || y >= order.rows) return { interval: -1, requests: 0, counts: new Map() };
    return whatIsAt(model, order, axis, first, end, x, x + perPixel);
  }

  say(x, y) {
    const { model, axis } = this.shown;
    const when = axis === model.axes.time ? formatTime(x) : `step ${formatNumber(Math.floor(x))}`;
    const { interval, requests, counts } = this.at(x, y);
    let text = `${when}: nothing here`;
    if (requests === 1) {
      const { request, phase, start, end, first, last } = model.intervals;
      const own = request[interval];
      const length = formatDuration(end[interval] - start[interval]);
      const steps =
        last[interval] > first[interval] ? `steps ${first[interval]} to ${last[interval]}` : `step ${first[interval]}`;
      const replica = model.requests.replica[own];
      const where = replica < 0 ? "" : `, replica ${replica}`;
      const when = `${formatTime(start[interval])} for ${length}`;
      const ran = last[interval] < first[interval] ? "" : `, ${steps}`;
      text = `${model.names[own]}: ${PHASES[phase[interval]].name} from ${when}${ran}${where}${this.marksOf(own)}`;
    } else if (requests > 1) {
      const each = PHASES.map(({ name }, phase) => counts.has(phase) && `${formatNumber(counts.get(phase))} ${name}`);
      text = `${when}: ${formatNumber(requests)} requests here: ${each.filter(Boolean).join(", ")}`;
    }
    this.onSay(text);
    this.sayOfLanes(x);
    return requests === 1 ? model.intervals.request[interval] : null;
  }

  sayOfLanes(x) {
    const { lanes } = this.shown.model;
    if (this.laneCanvas.current) this.onSayOfLanes(`${formatTime(x)}: ${describeLanes(lanes, x)}`);
  }

  marksOf(request) {
    const { marks } = this.shown.model;
    const counts = new Map();
    for (let mark = 0; mark < marks.rows; mark++) {
      if (marks.request[mark] === request) counts.set(marks.kind[mark], (counts.get(marks.kind[mark]) ?? 0) + 1);
    }
    return [...counts].map(([kind, count]) => `; ${MARKS[kind].name}${count > 1 ? ` ${count} times` : ""}`).join("");
  }

  // What the reader does.

  setView(view) {
    this.view = view;
    this.draw();
    clearTimeout(this.timer);
    const { axis, model } = this.shown;
    if (!this.onZoom || axis !== model.axes.time) return;
    this.timer = setTimeout(() => {
      this.told = { from: view.x0, to: view.x1 };
      this.onZoom(view.x0, view.x1);
    }, 150);
  }

  zoomBy(factorX, factorY, at = this.cursor) {
    const { axis, order } = this.shown;
    const { view } = this;
    const inside = at && at.x >= view.x0 && at.x <= view.x1 && at.y >= view.y0 && at.y <= view.y1;
    const { x, y } = inside ? at : { x: (view.x0 + view.x1) / 2, y: (view.y0 + Math.min(view.y1, order.rows)) / 2 };
    this.setView(zoomed(view, axis, order, x, y, factorX, factorY));
  }

  /** The rows of what happened in the time that is shown. */
  fitRows() {
    const { axis, order, model } = this.shown;
    this.setView(fitted(this.view, axis, order, model.firstInterval));
  }

  home() {
    this.setView(wholeView(this.shown.axis, this.shown.order));
  }

  moveCursor(x, y) {
    const { axis, order } = this.shown;
    this.cursor = { x: between(x, 0, axis.last), y: between(y, 0.5, Math.max(0.5, order.rows - 0.5)) };
    this.setView(showing(this.view, axis, order, this.cursor.x, Math.floor(this.cursor.y)));
    this.say(this.cursor.x, this.cursor.y);
  }

  onFocus() {
    // A pointer has its own place.
    if (this.cursor || this.drag || !this.shown) return;
    const { view } = this;
    const { order } = this.shown;
    this.moveCursor((view.x0 + view.x1) / 2, Math.floor((view.y0 + Math.min(view.y1, order.rows)) / 2) + 0.5);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.shown) return;
    const { view, cursor } = this;
    const far = event.shiftKey ? 10 : 1;
    const x = ((view.x1 - view.x0) / 100) * far;
    const y = Math.max(1, Math.round((view.y1 - view.y0) / this.size.height)) * far;
    const page = Math.max(1, Math.floor(view.y1 - view.y0) - 1);
    const at = cursor ?? { x: (view.x0 + view.x1) / 2, y: (view.y0 + view.y1) / 2 };
    const acts = {
      ArrowLeft: () => this.moveCursor(at.x - x, at.y),
      ArrowRight: () => this.moveCursor(at.x + x, at.y),
      ArrowUp: () => this.moveCursor(at.x, at.y - y),
      ArrowDown: () => this.moveCursor(at.x, at.y + y),
      PageUp: () => this.moveCursor(at.x, at.y - page),
      PageDown: () => this.moveCursor(at.x, at.y + page),
      "+": () => this.zoomBy(0.5, 0.5),
      "=": () => this.zoomBy(0.5, 0.5),
      "-": () => this.zoomBy(2, 2),
      ".": () => this.zoomBy(0.5, 1),
      ",": () => this.zoomBy(2, 1),
      f: () => this.fitRows(),
      Home: () => this.home(),
      Enter: () => this.choose(this.say(at.x, at.y)),
      Escape: () => this.choose(null, true),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }

  choose(request, none = false) {
    if (request !== null || none) this.onSelect?.(request);
  }

  placeOf(event) {
    const bounds = this.box.getBoundingClientRect();
    const { size, view } = this;
    const pixel = { x: event.clientX - bounds.left, y: event.clientY - bounds.top };
    return {
      pixel,
      x: view.x0 + ((pixel.x - size.left) / size.width) * (view.x1 - view.x0),
      y: view.y0 + ((pixel.y - TOP) / size.height) * (view.y1 - view.y0),
    };
  }

  onWheel(event) {
    const { axis, order } = this.shown;
    // On some systems Shift makes a wheel turn sideways.
    const isTurned = event.shiftKey && !event.deltaY;
    const [deltaX, deltaY] = isTurned ? [0, event.deltaX] : [event.deltaX, event.deltaY];
    const notches = between(deltaY / (event.deltaMode === 0 ? 100 : 3), -3, 3);
    const factor = NOTCH ** notches;
    const { view } = this;
    if (Math.abs(deltaX) > Math.abs(deltaY)) {
      const x = (deltaX / this.size.width) * (view.x1 - view.x0);
      this.setView(moved(view, axis, order, x, 0));
    } else {
      this.zoomBy(event.altKey ? 1 : factor, event.shiftKey ? 1 : factor, this.placeOf(event));
    }
    // At the end of the zoom, the page scrolls.
    if (EDGES.some((edge) => view[edge] !== this.view[edge])) event.preventDefault();
  }

  onPointerDown(event) {
    if (event.button !== 0) return;
    const { pixel } = this.placeOf(event);
    this.drag = { startX: pixel.x, startY: pixel.y, x: pixel.x, y: pixel.y, view: this.view, marks: event.shiftKey };
    this.box.setPointerCapture(event.pointerId);
  }

  onPointerMove(event) {
    const { pixel, x, y } = this.placeOf(event);
    const { drag, size } = this;
    if (drag && !drag.marks) {
      const { axis, order } = this.shown;
      const perX = (drag.view.x1 - drag.view.x0) / size.width;
      const perY = (drag.view.y1 - drag.view.y0) / size.height;
      drag.far ||= Math.hypot(pixel.x - drag.startX, pixel.y - drag.startY) > CLICK_DISTANCE;
      if (!drag.far) return;
      this.setView(moved(drag.view, axis, order, (drag.startX - pixel.x) * perX, (drag.startY - pixel.y) * perY));
      return;
    }
    if (drag) {
      drag.far = true;
      drag.x = between(pixel.x, size.left, this.width);
    }
    this.cursor = { x, y };
    this.say(x, y);
    this.drawOver();
  }

  onPointerOverLanes(event) {
    this.cursor = this.placeOf(event);
    this.sayOfLanes(this.cursor.x);
    this.drawOver();
  }

  onPointerUp(event, cancelled = false) {
    const { drag } = this;
    this.drag = null;
    if (!drag || cancelled) return;
    const { x, y } = this.placeOf(event);
    if (drag.marks && Math.abs(drag.x - drag.startX) > CLICK_DISTANCE) {
      const { axis, order } = this.shown;
      const at = (pixel) => this.view.x0 + ((pixel - this.size.left) / this.size.width) * (this.view.x1 - this.view.x0);
      const [from, to] = [at(drag.startX), at(drag.x)].sort((one, other) => one - other);
      this.setView(fitted(spanning(this.view, axis, order, from, to), axis, order, this.shown.model.firstInterval));
    } else if (!drag.far) {
      this.cursor = { x, y };
      this.choose(this.say(x, y));
    }
    this.drawOver();
  }

  onPointerLeave() {
    if (this.drag || document.activeElement === this.box) return;
    this.cursor = null;
    if (this.colours && this.shown) this.drawOver();
  }
}
