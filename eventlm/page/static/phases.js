// How phases and marks look: a colour and a pattern each, so that they differ without the colour. timeline.py has the
// names in this order.

/**
 * `inSteps`: the request is in each step that the phase spans. `weight`: where several phases share a pixel, one that
 * is rare and matters stands out.
 */
export const PHASES = [
  { name: "waiting", weight: 1, pattern: (x, y) => (x + y) % 4 === 0 },
  { name: "prefill", inSteps: true, weight: 2, pattern: (x) => x % 4 === 0 },
  { name: "decode", inSteps: true, weight: 1, pattern: () => false },
  { name: "preempted", weight: 3, pattern: (x, y) => (x + y) % 8 === 0 || (x - y + 8) % 8 === 0 },
  { name: "recompute", inSteps: true, weight: 3, pattern: (x, y) => y % 4 === 0 },
  { name: "swapped", weight: 3, pattern: (x, y) => x % 4 < 2 && y % 4 < 2 },
  { name: "stalled", weight: 3, pattern: (x, y) => (x - y + 8) % 4 === 0 },
  { name: "exchange", weight: 2, pattern: (x, y) => (x + y) % 2 === 0 },
  { name: "first token there", weight: 2, pattern: (x) => x % 4 === 0 },
  { name: "streaming", weight: 1, pattern: () => false },
  { name: "retry", weight: 3, pattern: (x, y) => (x + y) % 8 === 0 || (x - y + 8) % 8 === 0 },
];
/** A mark that is not `small` goes through all rows that it concerns. */
export const MARKS = [
  { name: "preempted", small: true, glyph: "▼" },
  { name: "swapped out", small: true, glyph: "◆" },
  { name: "worker lost", small: false, glyph: "✕" },
  { name: "gap", small: false, glyph: "?" },
  { name: "rejected", small: true, glyph: "⊘" },
  { name: "failed", small: true, glyph: "!" },
  { name: "cancelled", small: true, glyph: "◻" },
  { name: "attempt failed", small: true, glyph: "↻" },
  { name: "backend down", small: false, glyph: "▽" },
  { name: "engine down", small: false, glyph: "✖" },
];
export const PATTERN_SIZE = 8;
/** How strongly a pixel is painted, by how much of it is covered. */
export const LEVELS = 8;

export const PHASE_COLOURS = PHASES.map(({ name }) => `phase-${name.replaceAll(" ", "-")}`);

/**
 * For each phase, level and place in the pattern, the colour of a pixel as an ImageData has it.
 * colours: of the phases and of `raised`, which lies behind, as `resolveColours` gives them.
 */
export function phasePixels(colours) {
  const behind = channels(colours.raised);
  const dark = behind[0] < 128;
  const pixels = new Uint32Array(PHASES.length * LEVELS * PATTERN_SIZE * PATTERN_SIZE);
  const bytes = new Uint8ClampedArray(pixels.buffer);
  let at = 0;
  PHASES.forEach(({ pattern }, phase) => {
    const base = channels(colours[PHASE_COLOURS[phase]]);
    const other = base.map((value) => (dark ? value * 0.5 : value + (255 - value) * 0.6));
    for (let level = 0; level < LEVELS; level++) {
      const share = 0.4 + (0.6 * level) / (LEVELS - 1);
      for (let y = 0; y < PATTERN_SIZE; y++) {
        for (let x = 0; x < PATTERN_SIZE; x++) {
          const colour = pattern(x, y) ? other : base;
          for (let channel = 0; channel < 3; channel++) {
            bytes[at++] = colour[channel] * share + behind[channel] * (1 - share);
          }
          bytes[at++] = 255;
        }
      }
    }
  });
  return pixels;
}

function channels(colour) {
  return colour
    .match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
}
