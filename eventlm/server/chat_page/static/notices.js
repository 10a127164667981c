// Short messages to the user, each with a button.

import { element } from "./dom.js";

const TOAST_MS = 8000;

/** Show a text above the composer, with a button, until it is acted on; an empty text removes it. */
export function notify(text, label, act) {
  const notice = document.getElementById("notice");
  notice.hidden = !text;
  notice.replaceChildren(
    ...(text ? [element("p", {}, text), button(label ?? "Dismiss", act ?? (() => notify("")))] : []),
  );
}

let toastTimer = 0;

/** Show a text with a button for a moment. */
export function toast(text, label, act) {
  const node = document.getElementById("toast");
  const close = () => node.replaceChildren();
  node.replaceChildren(
    element("p", {}, text),
    button(label, () => {
      close();
      act();
    }),
  );
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, TOAST_MS);
}

function button(label, onclick) {
  return element("button", { type: "button", className: "quiet", onclick }, label);
}
