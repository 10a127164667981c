// Which part of a timeline is shown, and how it changes. A view is {x0, x1, y0, y1}: units of the axis, and rows.

/** No fewer rows fill the height. */
const FEWEST_ROWS = 8;
export const EDGES = ["x0", "x1", "y0", "y1"];

/** All of it. Few rows do not fill the height. */
export function wholeView(axis, order) {
  return { x0: 0, x1: axis.last, y0: 0, y1: Math.max(FEWEST_ROWS, order.rows) };
}

/** Around a place that stays where it is; by a factor for each direction, below 1 to see less. */
export function zoomed(view, axis, order, x, y, factorX, factorY) {
  const width = between((view.x1 - view.x0) * factorX, Math.min(axis.least, axis.last), axis.last);
  const rows = Math.max(FEWEST_ROWS, order.rows);
  const height = between((view.y1 - view.y0) * factorY, FEWEST_ROWS, rows);
  const left = x - ((x - view.x0) / (view.x1 - view.x0)) * width;
  const top = y - ((y - view.y0) / (view.y1 - view.y0)) * height;
  return placed(left, width, axis.last, top, height, rows);
}

/** By so many units and rows to the right and down. */
export function moved(view, axis, order, x, y) {
  const rows = Math.max(FEWEST_ROWS, order.rows);
  return placed(view.x0 + x, view.x1 - view.x0, axis.last, view.y0 + y, view.y1 - view.y0, rows);
}

/** From x to x. */
export function spanning(view, axis, order, from, to) {
  const width = between(to - from, Math.min(axis.least, axis.last), axis.last);
  return moved({ ...view, x0: from, x1: from + width }, axis, order, 0, 0);
}

/** With the rows of all that happened in its stretch, and no others before and after them. */
export function fitted(view, axis, order, firstInterval) {
  let first = order.rows;
  let last = -1;
  for (let request = 0; request < order.rowOf.length; request++) {
    const [begin, end] = [firstInterval[request], firstInterval[request + 1]];
    if (begin === end || axis.start[begin] >= view.x1 || axis.end[end - 1] <= view.x0) continue;
    const row = order.rowOf[request];
    if (row < first) first = row;
    if (row > last) last = row;
  }
  if (last < 0) return view;
  const rows = Math.max(FEWEST_ROWS, order.rows);
  const height = Math.max(FEWEST_ROWS, last + 1 - first);
  return placed(view.x0, view.x1 - view.x0, axis.last, first, height, rows);
}

/** Of data that has grown: all of it, if all was shown, or else the same part. */
export function kept(view, before, after) {
  const whole = wholeView(before.axis, before.order);
  const all = EDGES.every((edge) => view[edge] === whole[edge]);
  return all ? wholeView(after.axis, after.order) : moved(view, after.axis, after.order, 0, 0);
}

/** The same size, moved as little as needed to have a place inside, at the edge or a little further in. */
export function showing(view, axis, order, x, y) {
  const marginX = (view.x1 - view.x0) * 0.05;
  const marginY = Math.min(1, (view.y1 - view.y0) * 0.05);
  const byX = Math.min(0, x - marginX - view.x0) || Math.max(0, x + marginX - view.x1);
  const byY = Math.min(0, y - marginY - view.y0) || Math.max(0, y + 1 + marginY - view.y1);
  return moved(view, axis, order, byX, byY);
}

function placed(left, width, last, top, height, rows) {
  const x0 = between(left, 0, last - width);
  const y0 = between(top, 0, rows - height);
  return { x0, x1: x0 + width, y0, y1: y0 + height };
}

export function between(value, least, most) {
  return Math.max(least, Math.min(most, value));
}
