// What all pages have: the header, the tabs, the choice of a theme, and what is said when a page fails.

import { Component, h, render } from "preact";
import { usePlace } from "./place.js";
import { Tabs } from "./tabs.js";
import { chooseTheme, useTheme } from "./theme.js";

/** Draw `app(data)` into the document. data: what `single_file` was given, or null on a served page. */
export function start(app) {
  const source = document.getElementById("data");
  const Root = () => app(source && JSON.parse(source.textContent));
  render(h(FailureShown, {}, h(Root)), document.getElementById("app"));
}

/**
 * A page: its title, a line of details, and tabs as `Tabs` takes them.
 *
 * details: texts, such as the version and the file. actions: what stands on the right of the header, before the theme.
 */
export function Shell({ title, details = [], actions, tabs, notices }) {
  const [place, go] = usePlace();
  return [
    h(
      "header",
      {},
      h(
        "div",
        { class: "heading" },
        h("h1", {}, title),
        h("p", { class: "note" }, details.filter(Boolean).join(" · ")),
      ),
      h("div", { class: "actions" }, actions, h(ThemeChoice)),
    ),
    h("main", {}, notices, h(Tabs, { label: "Views", tabs, chosen: place.tab, onChoose: (name) => go(name) })),
  ];
}

function ThemeChoice() {
  const { theme } = useTheme();
  const choices = [
    ["system", "System theme"],
    ["light", "Light"],
    ["dark", "Dark"],
  ];
  return h(
    "label",
    { class: "theme-choice" },
    h("span", { class: "off-screen" }, "Theme"),
    h(
      "select",
      { value: theme, onChange: (event) => chooseTheme(event.target.value) },
      choices.map(([value, text]) => h("option", { key: value, value, selected: value === theme }, text)),
    ),
  );
}

/** A line that must be seen. kind: "error", "warning" or "note". */
export function Notice({ kind = "note", children }) {
  return h("p", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" }, children);
}

/** What its children fail with, in their place. The browser's console has the rest. */
export class FailureShown extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ failure: String(error?.message ?? error) });
  }

  render({ children }, { failure }) {
    return failure ? h(Notice, { kind: "error" }, `This part of the page failed: ${failure}`) : children;
  }
}
