// Numbers as people read them. Times are in ns, as in a trace.

const MICROSECOND = 1e3;
const MILLISECOND = 1e6;
const SECOND = 1e9;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

const COUNTS = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

/** `1,234`, `0.25`; a dash where there is no value. */
export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return COUNTS.format(value);
}

/** 0.123 as `12.3%`. */
export function formatShare(value) {
  return `${formatNumber(Math.round(value * 1000) / 10)}%`;
}

/** `640 B`, `1.5 MiB`. */
export function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return `${formatNumber(Math.round((value / 1024 ** power) * 10) / 10)} ${units[power]}`;
}

/** How long, with three digits: `12.3 ms`, `4.05 s`, `2 min 5 s`, `3 h 12 min`. */
export function formatDuration(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  if (ns < 0) return `−${formatDuration(-ns)}`;
  if (ns === 0) return "0 s";
  if (ns < MICROSECOND) return `${Math.round(ns)} ns`;
  if (ns < 0.9995 * MILLISECOND) return `${digits(ns / MICROSECOND)} µs`;
  if (ns < 0.9995 * SECOND) return `${digits(ns / MILLISECOND)} ms`;
  if (ns < 59.95 * SECOND) return `${digits(ns / SECOND)} s`;
  if (ns < HOUR - SECOND / 2) return two(ns, MINUTE, "min", SECOND, "s");
  if (ns < DAY) return two(ns, HOUR, "h", MINUTE, "min");
  return two(ns, DAY, "d", HOUR, "h");
}

function digits(value) {
  return String(Number(value.toPrecision(3)));
}

function two(ns, large, largeName, small, smallName) {
  const all = Math.round(ns / small);
  const ratio = large / small;
  const rest = all % ratio;
  return `${Math.floor(all / ratio)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/** When, from the start of the run: `0:05.250`, `1:02:03`. `resolution`: ns between neighbours that must differ. */
export function formatTime(ns, resolution = MILLISECOND) {
  if (ns < 0) return `−${formatTime(-ns, resolution)}`;
  const places = Math.max(0, Math.min(9, Math.ceil(-Math.log10(resolution / SECOND) - 1e-9)));
  const scale = 10 ** places;
  const units = Math.round((ns / SECOND) * scale);
  const whole = Math.floor(units / scale);
  const pad = (value, width) => String(value).padStart(width, "0");
  const fraction = places ? `.${pad(units - whole * scale, places)}` : "";
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  const seconds = pad(whole % 60, 2) + fraction;
  return hours ? `${hours}:${pad(minutes, 2)}:${seconds}` : `${minutes}:${seconds}`;
}

/** Distances of ticks on an axis of time that people find round, in ns, ascending. */
export const TIME_TICKS = [
  ...[1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((power) => [power, 2 * power, 5 * power]),
  ...[1, 2, 5, 10, 15, 30].map((count) => count * SECOND),
  ...[1, 2, 5, 10, 15, 30].map((count) => count * MINUTE),
  ...[1, 2, 3, 6, 12].map((count) => count * HOUR),
  ...[1, 2, 5, 10, 20, 50].map((count) => count * DAY),
];
/** The same for counts. */
export const COUNT_TICKS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((power) => [power, 2 * power, 5 * power]);
/** And for bytes. */
export const BYTE_TICKS = Array.from({ length: 50 }, (_, power) => 2 ** power);
