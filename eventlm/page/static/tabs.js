// Tabs, one panel at a time.

import { h } from "preact";
import { useEffect, useRef } from "preact/hooks";

/**
 * Tabs and their panels.
 *
 * tabs: [{name, title, count, draw}], where `name` is unique, `count` may stand beside the title, and `draw()` gives
 * the panel's content. chosen: the name of one; the first, if none has it. onChoose(name): the reader wants another.
 *
 * A panel is drawn when it is first looked at, and kept.
 */
export function Tabs({ label, tabs, chosen, onChoose }) {
  const visited = useRef(new Set());
  const buttons = useRef([]);
  const current = Math.max(
    0,
    tabs.findIndex((tab) => tab.name === chosen),
  );
  visited.current.add(tabs[current].name);

  // On a narrow screen the tabs scroll.
  useEffect(() => buttons.current[current].scrollIntoView({ block: "nearest", inline: "nearest" }), [current]);

  function onKeyDown(event) {
    const last = tabs.length - 1;
    const next = {
      ArrowLeft: current === 0 ? last : current - 1,
      ArrowRight: current === last ? 0 : current + 1,
      Home: 0,
      End: last,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    onChoose(tabs[next].name);
    buttons.current[next].focus();
  }

  return [
    h(
      "div",
      { class: "tabs", role: "tablist", "aria-label": label, onKeyDown },
      tabs.map((tab, number) =>
        h(
          "button",
          {
            key: tab.name,
            type: "button",
            role: "tab",
            id: `tab-${number}`,
            ref: (node) => (buttons.current[number] = node),
            "aria-selected": String(number === current),
            "aria-controls": `panel-${number}`,
            tabIndex: number === current ? 0 : -1,
            onClick: () => onChoose(tab.name),
          },
          tab.title,
          tab.count !== undefined && h("span", { class: "count" }, tab.count),
        ),
      ),
    ),
    tabs.map((tab, number) =>
      h(
        "div",
        {
          key: tab.name,
          class: "panel",
          role: "tabpanel",
          id: `panel-${number}`,
          "aria-labelledby": `tab-${number}`,
          hidden: number !== current,
        },
        visited.current.has(tab.name) && tab.draw(),
      ),
    ),
  ];
}
