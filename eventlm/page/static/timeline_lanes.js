// Lanes above the requests of a timeline: which step each stage or KV group of a replica had, and which waited for it;
// or which requests a backend had.

import { formatDuration, formatNumber } from "./format.js";
import { lowerBound } from "./timeline_model.js";
import { FONT } from "./timeline_overlay.js";
import { paint } from "./timeline_raster.js";

/** Of a lane in CSS pixels: all of it, its steps, and below them those that wait. */
const LANE = 18;
const STEPS = 11;
const WAITS = 3;
/** Steps that are wider, in CSS pixels, have a line before them. */
const LEAST_STEP = 5;

export function heightOfLanes(lanes) {
  return lanes.names.length * LANE;
}

/** Draw all that changes with the view into a canvas as wide as the timeline. size: {left, width} of its plot. */
export function drawLanes(canvas, lanes, view, size, { colours, pixels, scale }) {
  const width = size.left + size.width;
  const height = heightOfLanes(lanes);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  const wide = Math.max(1, Math.round(size.width * scale));
  lanes.names.forEach((name, lane) => {
    const part = { x0: view.x0, x1: view.x1, y0: lane, y1: lane + 1 };
    let top = lane * LANE + 1;
    for (const [model, high] of [
      [lanes.steps, STEPS],
      [lanes.waits, WAITS],
    ]) {
      const image = context.createImageData(wide, high * scale);
      paint(image, model, lanes.order, model.intervals, part, pixels, scale);
      context.putImageData(image, Math.round(size.left * scale), Math.round(top * scale));
      top += high;
    }
  });
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = `11px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  lanes.names.forEach((name, lane) => {
    context.fillStyle = colours.muted;
    context.fillText(name, size.left - 8, lane * LANE + 1 + STEPS / 2, size.left - 10);
    context.fillStyle = colours.raised;
    drawStarts(context, lanes, lane, view, size);
  });
}

function drawStarts(context, { columns, first }, lane, view, size) {
  const { start } = columns;
  const from = lowerBound(start, view.x0, first[lane], first[lane + 1]);
  const end = lowerBound(start, view.x1, from, first[lane + 1]);
  if ((end - from) * LEAST_STEP > size.width) return;
  const perUnit = size.width / (view.x1 - view.x0);
  for (let row = from; row < end; row++) {
    context.fillRect(size.left + (start[row] - view.x0) * perUnit, lane * LANE + 1, 1, STEPS);
  }
}

/** What each lane does at a time, in words. */
export function describeLanes(lanes, time) {
  let named = "";
  return lanes.names
    .map((name, lane) => {
      named = name || named;
      return `${named}: ${describeLane(lanes, lane, time)}`;
    })
    .join("; ");
}

function describeLane({ columns, free, first, nouns }, lane, time) {
  const { step, start, end, came, tokens, most } = columns;
  const next = lowerBound(start, time + 1, first[lane], first[lane + 1]);
  const now = next - 1;
  const does = [];
  if (now >= first[lane] && time < end[now]) {
    const part = most[now] ? `${formatNumber(tokens[now])} tokens of ` : "";
    does.push(`${part}${nouns[lane]} ${step[now]} for ${formatDuration(end[now] - start[now])}`);
  }
  for (let row = next; row < first[lane + 1] && came[row] <= time; row++) {
    const verb = time < free[row] ? "waits" : "is on its way";
    does.push(`step ${step[row]} ${verb} for ${formatDuration(start[row] - came[row])}`);
  }
  return does.length ? does.join(", ") : "nothing";
}
