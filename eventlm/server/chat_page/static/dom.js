// DOM nodes. Text only ever becomes a text node: no HTML is parsed.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Properties with a dash, and `role`, are attributes. Children that are null or "" are left out. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child || child === 0));
  return node;
}

/** One of the icons in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows an icon only; the label is read out and shown as a tooltip. */
export function iconButton(name, label, onclick) {
  return element(
    "button",
    { type: "button", className: "icon-button", "aria-label": label, title: label, onclick },
    icon(name),
  );
}

/** A button that copies what `text()` returns, and says so for a moment. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

/** The clipboard of the browser is there only over HTTPS and on this machine; the old way works everywhere. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { value: text, className: "off-screen", readOnly: true });
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
}

/** As high as its text; the style sheet sets the most. */
export function growWithText(area) {
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight}px`;
  };
  area.addEventListener("input", fit);
  requestAnimationFrame(fit);
  return fit;
}

/** Act on a key unless an input method is using it, for which Safari gives the code 229. */
export function onKey(target, key, act) {
  target.addEventListener("keydown", (event) => {
    if (event.key === key && !event.isComposing && event.keyCode !== 229) act(event);
  });
}

/** Enter sends, Shift+Enter is a new line; on a touch screen Enter is a new line. */
export function sendOnEnter(area, send) {
  onKey(area, "Enter", (event) => {
    if (event.shiftKey || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    send();
  });
}
