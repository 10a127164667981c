// Intervals as pixels. A pixel may stand for thousands of them: it shows the phase that covers the most of it.

import { LEVELS, PATTERN_SIZE, PHASES } from "./phases.js";

/** Parts of a pixel that are told apart. */
const PARTS = 64;
const TILE = PATTERN_SIZE * PATTERN_SIZE;

/**
 * Paint a view. image: an ImageData as large as the plot. axis: of the model, `start` and `end` of intervals.
 * view: {x0, x1, y0, y1} in units of the axis and rows. pixels: of `phasePixels`. scale: device pixels per CSS pixel.
 */
export function paint(image, model, order, axis, view, pixels, scale) {
  const { width, height } = image;
  const out = new Uint32Array(image.data.buffer);
  out.fill(0);
  const line = newLine(width);
  const perRow = height / (view.y1 - view.y0);
  const gap = perRow >= 4 * scale ? Math.max(scale, Math.round(perRow * 0.15)) : 0;
  const coarse = Math.max(0, Math.round(Math.log2(scale)));
  let y = 0;
  while (y < height) {
    // One row of many pixels, or a pixel of many rows.
    const first = Math.floor(view.y0 + (perRow >= 1 ? y + 0.5 : y) / perRow);
    let next = perRow >= 1 ? Math.min(height, Math.ceil((first + 1 - view.y0) * perRow - 0.5)) : y + 1;
    if (next <= y) next = y + 1;
    const end = perRow >= 1 ? first + 1 : Math.max(first + 1, Math.floor(view.y0 + (y + 1) / perRow));
    if (first < order.rows && first >= 0) {
      coverLine(line, model, order, axis, view, first, Math.min(end, order.rows));
      const bottom = Math.min(height, Math.max(y + 1, next - gap));
      for (let row = y; row < bottom; row++) copyLine(line, out, row, width, pixels, coarse);
    }
    y = next;
  }
}

function newLine(width) {
  return {
    width,
    // For each phase, by how much the coverage differs from that of the pixel before.
    changes: new Int32Array(PHASES.length * (width + 2)),
    // The place of each pixel's tile among those of `phasePixels`, or -1.
    tiles: new Int32Array(width),
  };
}

function coverLine(line, model, order, axis, view, first, end) {
  const { width, changes, tiles } = line;
  const { firstInterval, requests } = model;
  const { phase } = model.intervals;
  const { start, end: ends } = axis;
  const stride = width + 2;
  const perUnit = width / (view.x1 - view.x0);
  const inTime = axis === model.axes.time;
  changes.fill(0);
  let touched = 0;
  for (let place = order.starts[first]; place < order.starts[end]; place++) {
    const request = order.requests[place];
    if (inTime && (requests.arrived[request] >= view.x1 || requests.ended[request] <= view.x0)) continue;
    let any = 0;
    for (let each = firstInterval[request]; each < firstInterval[request + 1]; each++) {
      if (start[each] >= view.x1) break;
      if (ends[each] <= view.x0) continue;
      any = 1;
      const from = Math.max(0, (start[each] - view.x0) * perUnit);
      const to = Math.min(width, (ends[each] - view.x0) * perUnit);
      const base = phase[each] * stride;
      let pixel = from | 0;
      let part = ((from - pixel) * PARTS) | 0;
      changes[base + pixel] += PARTS - part;
      changes[base + pixel + 1] += part;
      pixel = to | 0;
      part = ((to - pixel) * PARTS) | 0;
      changes[base + pixel] -= PARTS - part;
      changes[base + pixel + 1] -= part;
    }
    touched += any;
  }
  if (touched === 0) {
    tiles.fill(-1);
    return;
  }
  const whole = PARTS * Math.min(end - first, touched);
  const sums = new Int32Array(PHASES.length);
  for (let x = 0; x < width; x++) {
    let best = 0;
    let chosen = -1;
    let covered = 0;
    for (let each = 0; each < PHASES.length; each++) {
      const sum = (sums[each] += changes[each * stride + x]);
      if (sum <= 0) continue;
      covered += sum;
      const weight = sum * PHASES[each].weight;
      if (weight > best) {
        best = weight;
        chosen = each;
      }
    }
    if (chosen < 0) {
      tiles[x] = -1;
    } else {
      const level = Math.min(LEVELS - 1, Math.floor((covered / whole) * LEVELS));
      tiles[x] = (chosen * LEVELS + level) * TILE;
    }
  }
}

function copyLine({ tiles }, out, y, width, pixels, coarse) {
  const patternRow = ((y >> coarse) % PATTERN_SIZE) * PATTERN_SIZE;
  const at = y * width;
  for (let x = 0; x < width; x++) {
    const tile = tiles[x];
    if (tile >= 0) out[at + x] = pixels[tile + patternRow + ((x >> coarse) & (PATTERN_SIZE - 1))];
  }
}
