// Shows numbers as each function formats them.

import { h } from "preact";
import { formatBytes, formatDuration, formatNumber, formatShare, formatTime } from "./format.js";
import { start } from "./shell.js";

const FORMATS = { formatBytes, formatDuration, formatNumber, formatShare, formatTime };

start((data) => [
  h("h1", {}, "Formats"),
  h(
    "ul",
    {},
    Object.entries(FORMATS).map(([name, format]) =>
      h("li", {}, `${name}: ${data[name].map((value) => format(value)).join(" | ")}`),
    ),
  ),
]);
