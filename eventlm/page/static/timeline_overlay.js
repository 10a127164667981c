// What is drawn over the pixels of a timeline: axis, names of rows, borders of steps, marks, selection and cursor.

import { COUNT_TICKS, formatNumber, formatTime, TIME_TICKS } from "./format.js";
import { MARKS, PHASES } from "./phases.js";
import { lowerBound } from "./timeline_model.js";

/** Space around the plot, in CSS pixels. */
export const TOP = 16;
export const BOTTOM = 22;
export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
/** Marks closer than this, in CSS pixels, are drawn once; those that are dots must let the phases be seen. */
const MARK_SPACE = 5;
const DOT_SPACE = 16;
/** In lower rows, marks are dots. */
const LEAST_ROW_OF_GLYPHS = 6;

/** How much the names of rows take. */
export function gutterOf(width) {
  return width < 600 ? 64 : 112;
}

/** All that changes with the view. `size` is of the plot: {left, width, height}, in CSS pixels. */
export function drawOverlay(context, scene, view, size) {
  const { model, order, axis, colours } = scene;
  const perUnit = size.width / (view.x1 - view.x0);
  const perRow = size.height / (view.y1 - view.y0);
  const place = {
    x: (value) => size.left + (value - view.x0) * perUnit,
    y: (row) => TOP + (row - view.y0) * perRow,
    perUnit,
    perRow,
  };
  context.lineWidth = 1;
  drawTicks(context, scene, view, size, place);
  drawNames(context, scene, view, size, place);
  context.save();
  context.beginPath();
  context.rect(size.left, 0, size.width, TOP + size.height);
  context.clip();
  drawSteps(context, scene, view, size, place);
  drawMarks(context, scene, view, size, place);
  if (scene.selected !== null && scene.selected !== undefined) {
    const row = order.rowOf[scene.selected];
    const height = Math.max(2, perRow);
    const from = axis === model.axes.time ? place.x(model.requests.arrived[scene.selected]) : size.left;
    const to = axis === model.axes.time ? place.x(model.requests.ended[scene.selected]) : size.left + size.width;
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.strokeRect(from - 2, place.y(row) - 1, Math.max(4, to - from + 4), height + 1);
  }
  context.restore();
}

function drawTicks(context, { model, axis, colours }, view, size, place) {
  const inTime = axis === model.axes.time;
  const most = Math.max(2, size.width / 90);
  const distance = (inTime ? TIME_TICKS : COUNT_TICKS).find((each) => (view.x1 - view.x0) / each <= most);
  context.font = `12px ${FONT}`;
  context.textBaseline = "top";
  context.textAlign = "center";
  context.strokeStyle = colours.line;
  context.fillStyle = colours.muted;
  const bottom = TOP + size.height;
  context.strokeRect(size.left + 0.5, TOP + 0.5, size.width - 1, size.height - 1);
  if (!distance) return;
  for (let tick = Math.ceil(view.x0 / distance) * distance; tick <= view.x1; tick += distance) {
    const x = Math.round(place.x(tick)) + 0.5;
    context.beginPath();
    context.moveTo(x, bottom);
    context.lineTo(x, bottom + 4);
    context.stroke();
    const text = inTime ? formatTime(tick, distance) : formatNumber(tick);
    const half = context.measureText(text).width / 2;
    if (x + half <= size.left + size.width + 8) context.fillText(text, x, bottom + 6);
  }
}

function drawNames(context, { model, order, colours }, view, size, place) {
  context.save();
  context.beginPath();
  context.rect(0, TOP, size.left - 6, size.height);
  context.clip();
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillStyle = colours.muted;
  context.font = `11px ${FONT}`;
  if (place.perRow >= 13) {
    for (let row = Math.max(0, Math.floor(view.y0)); row < Math.min(order.rows, view.y1); row++) {
      context.fillText(nameOf(context, model, order, row, size), size.left - 8, place.y(row + 0.5));
    }
  } else if (order.groups.length === 0) {
    // One in so many rows.
    const distance = COUNT_TICKS.find((each) => each * place.perRow >= 40) ?? order.rows;
    for (let row = Math.ceil(view.y0 / distance) * distance; row < Math.min(order.rows, view.y1); row += distance) {
      const y = Math.max(TOP + 7, place.y(row + 0.5));
      context.fillText(nameOf(context, model, order, row, size), size.left - 8, y);
    }
  }
  context.restore();
  for (const group of order.groups) {
    const top = Math.max(TOP, place.y(group.first));
    const bottom = Math.min(TOP + size.height, place.y(group.end));
    if (bottom <= top) continue;
    context.strokeStyle = colours.field;
    context.beginPath();
    context.moveTo(place.perRow >= 13 ? size.left : 0, Math.round(top) + 0.5);
    context.lineTo(size.left + size.width, Math.round(top) + 0.5);
    context.stroke();
    if (place.perRow >= 13 || bottom - top < 12) continue;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillStyle = colours.text;
    context.fillText(shortened(context, group.label, size.left - 8), 2, top + 2);
  }
}

/** A row's only request; or its slot, where several share it. */
function nameOf(context, model, order, row, size) {
  const only = order.starts[row + 1] - order.starts[row] === 1;
  const name = only ? model.names[order.requests[order.starts[row]]] : `slot ${row}`;
  return shortened(context, name, size.left - 10);
}

/** Of a name that is too long, the end, where names differ. */
function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.min(text.length, 40);
  while (length > 1 && context.measureText(`…${text.slice(-length)}`).width > width) length--;
  return `…${text.slice(-length)}`;
}

/** A line before each step, where a step is wide enough to be seen. */
function drawSteps(context, { model, order, axis, colours }, view, size, place) {
  if (place.perRow < 6) return;
  const inTime = axis === model.axes.time;
  const { intervals, steps, requests } = model;
  context.fillStyle = colours.raised;
  for (let row = Math.max(0, Math.floor(view.y0)); row < Math.min(order.rows, view.y1); row++) {
    const top = place.y(row);
    const height = place.perRow * 0.85;
    for (let at = order.starts[row]; at < order.starts[row + 1]; at++) {
      const request = order.requests[at];
      const begin = model.firstOfReplica.get(requests.replica[request]);
      for (let each = model.firstInterval[request]; each < model.firstInterval[request + 1]; each++) {
        if (!PHASES[intervals.phase[each]].inSteps) continue;
        const from = Math.max(axis.start[each], view.x0);
        const to = Math.min(axis.end[each], view.x1);
        const count = intervals.last[each] - intervals.first[each] + 1;
        if (to <= from || count < 2 || (axis.end[each] - axis.start[each]) * place.perUnit < 5 * count) continue;
        if (!inTime) {
          for (let step = Math.ceil(from); step < to; step++) context.fillRect(place.x(step), top, 1, height);
        } else if (begin !== undefined) {
          let step = lowerBound(steps.start, from, begin, endOfReplica(steps, begin));
          const end = endOfReplica(steps, begin);
          for (; step < end && steps.start[step] < to; step++)
            context.fillRect(place.x(steps.start[step]), top, 1, height);
        }
      }
    }
  }
}

function endOfReplica(steps, begin) {
  return lowerBound(steps.replica, steps.replica[begin] + 1, begin, steps.rows);
}

function drawMarks(context, { model, order, axis, colours }, view, size, place) {
  const { marks } = model;
  const inTime = axis === model.axes.time;
  const space = place.perRow < LEAST_ROW_OF_GLYPHS ? DOT_SPACE : MARK_SPACE;
  const taken = new Set();
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let mark = 0; mark < marks.rows; mark++) {
    const at = inTime ? marks.time[mark] : marks.step[mark];
    const until = inTime ? marks.until[mark] : at;
    if (until < view.x0 || at > view.x1) continue;
    const { small, glyph } = MARKS[marks.kind[mark]];
    const request = marks.request[mark];
    const x = place.x(at);
    const y = small && request >= 0 ? place.y(order.rowOf[request] + 0.4) : TOP;
    if (y < TOP || y > TOP + size.height) continue;
    // Kinds are fewer than 8, and a window has fewer than 2 ** 14 pixels each way.
    const cell = ((Math.round(y / space) << 14) | Math.round(Math.max(0, x) / space)) * 8 + marks.kind[mark];
    if (taken.has(cell)) continue;
    taken.add(cell);
    context.fillStyle = colours.danger;
    if (!small || request < 0) {
      const width = place.x(until) - x;
      context.globalAlpha = 0.18;
      if (width > 1) context.fillRect(x, TOP, width, size.height);
      context.globalAlpha = 1;
      context.fillRect(Math.round(x), TOP, 1, size.height);
      context.font = `bold 13px ${FONT}`;
      context.fillText(glyph, Math.max(size.left + 6, Math.min(x, size.left + size.width - 6)), TOP / 2);
    } else if (place.perRow >= LEAST_ROW_OF_GLYPHS) {
      context.font = `bold ${Math.min(12, Math.max(8, place.perRow))}px ${FONT}`;
      context.strokeStyle = colours.raised;
      context.lineWidth = 3;
      context.strokeText(glyph, x, y);
      context.fillText(glyph, x, y);
    } else {
      context.fillRect(Math.round(x) - 1, Math.round(y) - 1, 3, 3);
    }
  }
}

/** Where the reader is. */
export function drawCursor(context, colours, size, x, y) {
  context.strokeStyle = colours.accent;
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(Math.round(x) + 0.5, TOP);
  context.lineTo(Math.round(x) + 0.5, TOP + size.height);
  context.moveTo(size.left, Math.round(y) + 0.5);
  context.lineTo(size.left + size.width, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
}
