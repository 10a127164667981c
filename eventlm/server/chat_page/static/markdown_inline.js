// What stands within a block of Markdown: code, emphasis, links and line breaks.

import { element } from "./dom.js";

const MAX_DEPTH = 8;
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const CODE = /(`+)/y;
// Bounded, so that a text of many brackets takes no quadratic time.
const LABEL = String.raw`(?:[^[\]\\]|\\.|\[[^[\]]{0,200}\]){0,1000}`;
const TARGET = String.raw`(?:[^\s()<>]|\([^\s()<>]{0,500}\)){1,2000}`;
const TITLE = String.raw`"[^"]{0,500}"|'[^']{0,500}'`;
const LINK = new RegExp(String.raw`(!?)\[(${LABEL})\]\(\s*<?(${TARGET})>?(?:\s+(?:${TITLE}))?\s*\)`, "y");
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BARE_URL = /https?:\/\/[^\s<>"`]{1,2000}/y;
const BREAK_TAG = /<br *\/?>/iy;
/** The longest first. */
const EMPHASIS = [
  ["***", ["strong", "em"]],
  ["**", ["strong"]],
  ["__", ["strong"]],
  ["~~", ["del"]],
  ["*", ["em"]],
  ["_", ["em"]],
];
const SAFE_SCHEMES = ["http:", "https:", "mailto:"];
const SPECIAL = /[\\`![<h*_~\n]/g;

/** Nodes of a text. `depth` is how many other nodes it stands in; within a link there are no further links. */
export function inline(text, depth = 0, isInLink = false) {
  const nodes = [];
  /** Marks of which no further one closes, so that none is looked for twice. */
  const unclosed = new Set();
  let plain = "";
  let position = 0;
  const add = (node, end) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    position = end;
  };
  while (position < text.length) {
    SPECIAL.lastIndex = position;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(position, next);
    position = next;
    if (position === text.length) break;
    if (text[position] === "\n") {
      plain = plain.trimEnd();
      add(element("br"), position + 1);
      continue;
    }
    const found = span(text, position, { unclosed, depth, isInLink });
    if (!found) {
      plain += text[position];
      position += 1;
    } else if (typeof found.node === "string") {
      plain += found.node;
      position = found.end;
    } else {
      add(found.node, found.end);
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** What begins at a position, {node, end}; null for plain text. */
function span(text, position, context) {
  const match = (pattern) => {
    pattern.lastIndex = position;
    return pattern.exec(text);
  };
  let found = match(ESCAPE);
  if (found) return { node: found[1], end: position + 2 };
  if ((found = match(CODE))) return codeSpan(text, position, found[1], context.unclosed);
  if ((found = match(BREAK_TAG))) return { node: element("br"), end: position + found[0].length };
  if (!context.isInLink) {
    if ((found = match(LINK))) {
      const [whole, isPicture, label, target] = found;
      const shown = isPicture ? [`Picture: ${label || target}`] : inline(label, context.depth + 1, true);
      return { node: link(target, shown), end: position + whole.length };
    }
    if ((found = match(AUTOLINK))) return { node: link(found[1], [found[1]]), end: position + found[0].length };
    if ((found = match(BARE_URL))) {
      const url = trimmedUrl(found[0]);
      return { node: link(url, [url]), end: position + url.length };
    }
  }
  return context.depth < MAX_DEPTH ? emphasis(text, position, context) : null;
}

function codeSpan(text, position, ticks, unclosed) {
  const start = position + ticks.length;
  let end = unclosed.has(ticks) ? -1 : text.indexOf(ticks, start);
  while (end !== -1 && (text[end + ticks.length] === "`" || text[end - 1] === "`")) {
    end = text.indexOf(ticks, end + 1);
  }
  if (end === -1) {
    unclosed.add(ticks);
    return { node: ticks, end: start };
  }
  const code = text.slice(start, end).replaceAll("\n", " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  return { node: element("code", {}, isPadded ? code.slice(1, -1) : code), end: end + ticks.length };
}

function emphasis(text, position, { unclosed, depth, isInLink }) {
  for (const [mark, tags] of EMPHASIS) {
    if (!text.startsWith(mark, position) || unclosed.has(mark)) continue;
    const start = position + mark.length;
    const isOpening = start < text.length && /\S/.test(text[start]) && text[start] !== mark[0];
    if (!isOpening || (mark[0] === "_" && /\w/.test(text[position - 1] ?? ""))) continue;
    const end = closing(text, start, mark);
    if (end === -1) {
      unclosed.add(mark);
      continue;
    }
    const inner = inline(text.slice(start, end), depth + 1, isInLink);
    const node = tags.reduceRight((children, tag) => [element(tag, {}, children)], inner)[0];
    return { node, end: end + mark.length };
  }
  return null;
}

/** Where a mark closes what begins at `start`; -1 if it does not. */
function closing(text, start, mark) {
  for (let end = text.indexOf(mark, start); end !== -1; end = text.indexOf(mark, end + 1)) {
    const before = text[end - 1];
    const after = text[end + mark.length] ?? "";
    // Of a longer run, the last marks close: `*a **b***`.
    if (/\s/.test(before) || before === "\\" || after === mark[0]) continue;
    if (mark.length === 1 && before === mark[0]) continue;
    if (mark[0] === "_" && /\w/.test(after)) continue;
    return end;
  }
  return -1;
}

/** Only what leads to a web page or an address of mail; anything else is text. */
function link(target, children) {
  const url = URL.canParse(target) ? new URL(target) : null;
  if (!url || !SAFE_SCHEMES.includes(url.protocol)) return element("span", {}, children);
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href }, children);
}

/** Without what ends the sentence, and without a bracket that was opened before it. */
function trimmedUrl(url) {
  let trimmed = url.replace(/[.,;:!?'*_~]+$/, "");
  while (trimmed.endsWith(")") && !trimmed.includes("(")) trimmed = trimmed.slice(0, -1);
  return trimmed.replace(/[.,;:!?'*_~]+$/, "");
}
