// Cards and figures.

import { h } from "preact";

/** A part of a page under a heading. tone: "", "good", "warning" or "bad", which is also said in words by `verdict`. */
export function Card({ title, tone = "", verdict, aside, children }) {
  return h(
    "section",
    { class: `card ${tone}`, "aria-label": title },
    h(
      "div",
      { class: "card-head" },
      h("h2", {}, title),
      verdict && h("span", { class: "verdict" }, verdict),
      aside && h("div", { class: "aside" }, aside),
    ),
    children,
  );
}

/** Numbers with names: [{label, value, note}], as texts. */
export function Figures({ figures }) {
  return h(
    "dl",
    { class: "figures" },
    figures.map(({ label, value, note }) =>
      h("div", { key: label }, h("dt", {}, label), h("dd", {}, value), note && h("dd", { class: "note" }, note)),
    ),
  );
}
