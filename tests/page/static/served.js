// A page that no data come with.

import { h } from "preact";
import { Chart } from "./chart.js";
import { Shell, start } from "./shell.js";

const X = [0, 1e9, 2e9];
const SERIES = [{ label: "waiting", values: [1, 3, 2], kind: "step" }];

start((data) => {
  const tabs = [{ name: "queue", title: "Queue", draw: () => h(Chart, { title: "Requests", x: X, series: SERIES }) }];
  return h(Shell, { title: data === null ? "Served without data" : "Served with data", tabs });
});
