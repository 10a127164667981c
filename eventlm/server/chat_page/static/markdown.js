// Markdown as DOM nodes, made of text nodes only: what a model writes is never parsed as HTML.
//
// The blocks of CommonMark that models write, with GitHub's tables and strikethrough. Line breaks are kept. Pictures
// become links, because the page makes no request to other servers.

import { copyButton, element } from "./dom.js";
import { inline } from "./markdown_inline.js";

/** Quotes and lists within each other; what is deeper is shown as text. */
const MAX_DEPTH = 12;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** The source of each block that a container shows, so that a growing text renders only what is new. */
const shown = new WeakMap();

/** Show a text in a container. Blocks that are unchanged since the last time are left as they are. */
export function renderMarkdown(container, text) {
  const blocks = splitBlocks(text);
  const before = shown.get(container) ?? [];
  let same = 0;
  while (same < before.length && before[same] === blocks[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map((block) => renderBlock(block, 0)));
  shown.set(container, blocks);
}

function renderNested(text, depth) {
  return splitBlocks(text).map((block) => renderBlock(block, depth));
}

/** The sources of the blocks of a text. */
function splitBlocks(text) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
  const blocks = [];
  let start = 0;
  while (start < lines.length) {
    if (!lines[start].trim()) {
      start += 1;
      continue;
    }
    const end = blockEnd(lines, start);
    blocks.push(lines.slice(start, end).join("\n"));
    start = end;
  }
  return blocks;
}

/** The line after the block that begins at `start`. */
function blockEnd(lines, start) {
  const line = lines[start];
  const fence = FENCE.exec(line);
  if (fence) return fenceEnd(lines, start, fence[1]);
  if (HEADING.test(line) || RULE.test(line)) return start + 1;
  if (QUOTE.test(line)) return quoteEnd(lines, start);
  if (ITEM.test(line)) return listEnd(lines, start);
  if (isTable(lines, start)) return endWhere(lines, start + 2, (each) => !each.trim() || !each.includes("|"));
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !interruptsParagraph(lines, end)) end += 1;
  return end;
}

function endWhere(lines, start, isEnd) {
  let end = start;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return end;
}

function fenceEnd(lines, start, mark) {
  const isClosing = (line) => {
    const bare = line.trim();
    return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
  };
  return Math.min(lines.length, endWhere(lines, start + 1, isClosing) + 1);
}

function quoteEnd(lines, start) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !interruptsParagraph(lines, end)))
    end += 1;
  return end;
}

/** A list goes on with items, with lines that are indented, and with further lines of a paragraph. */
function listEnd(lines, start) {
  const base = ITEM.exec(lines[start]);
  let end = start + 1;
  while (end < lines.length) {
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    if (next === lines.length) break;
    const item = ITEM.exec(lines[next]);
    const indent = indentOf(lines[next]);
    const isNested = indent >= base[1].length + 2;
    const isSibling = item && !RULE.test(lines[next]) && kindOf(item[2]) === kindOf(base[2]);
    const isLazy = next === end && !item && !interruptsParagraph(lines, next);
    if (!isNested && !isSibling && !isLazy) break;
    const fence = isNested && FENCE.exec(lines[next].trimStart());
    end = fence ? fenceEnd(lines, next, fence[1]) : next + 1;
  }
  return end;
}

function kindOf(marker) {
  return /\d/.test(marker) ? marker.at(-1) : marker;
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function interruptsParagraph(lines, index) {
  const line = lines[index];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item) return line.trim().length > item[2].length && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return isTable(lines, index);
}

function isTable(lines, index) {
  const rule = lines[index + 1] ?? "";
  return lines[index].includes("|") && rule.includes("|") && TABLE_RULE.test(rule);
}

function renderBlock(source, depth) {
  const lines = source.split("\n");
  const [line] = lines;
  if (depth > MAX_DEPTH) return element("p", {}, source);
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, fence);
  const heading = HEADING.exec(line);
  if (heading) return element(`h${heading[1].length}`, {}, inline(heading[2] ?? ""));
  if (RULE.test(line)) return element("hr");
  if (QUOTE.test(line)) {
    const inner = lines.map((each) => each.replace(QUOTE, "")).join("\n");
    return element("blockquote", {}, renderNested(inner, depth + 1));
  }
  if (ITEM.test(line)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return element("p", {}, inline(lines.map((each) => each.trim()).join("\n")));
}

function codeBlock(lines, [, mark, info]) {
  const indent = indentOf(lines[0]);
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const code = lines
    .slice(1, isClosed ? -1 : undefined)
    .map((line) => line.slice(Math.min(indent, indentOf(line))))
    .join("\n");
  const [language] = info.trim().split(/\s/);
  return element(
    "figure",
    { className: "code" },
    element(
      "figcaption",
      {},
      element("span", {}, language || "text"),
      copyButton("Copy code", () => code),
    ),
    // A box that scrolls must be reachable with the keyboard.
    element("pre", { tabIndex: 0 }, element("code", {}, code)),
  );
}

function list(lines, depth) {
  const [, baseIndent, marker] = ITEM.exec(lines[0]);
  const items = [];
  let fence = null;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && !fence && item[1].length < baseIndent.length + 2) {
      items.push({ offset: item[0].length, lines: [line.slice(item[0].length)] });
    } else {
      const { offset, lines: own } = items.at(-1);
      own.push(line.slice(Math.min(offset, indentOf(line))));
    }
    const mark = FENCE.exec(items.at(-1).lines.at(-1))?.[1];
    if (mark) fence = fence ? null : mark;
  }
  const isLoose = lines.some((line, index) => !line.trim() && index < lines.length - 1);
  const nodes = items.map(({ lines: own }) => {
    const blocks = renderNested(own.join("\n"), depth + 1);
    return element(
      "li",
      {},
      isLoose ? blocks : blocks.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : node)),
    );
  });
  const start = parseInt(marker, 10);
  return Number.isNaN(start) ? element("ul", {}, nodes) : element("ol", { start }, nodes);
}

function table(lines) {
  const alignments = cells(lines[1]).map((rule) =>
    rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left",
  );
  const row = (line, tag) => {
    const texts = cells(line);
    return element(
      "tr",
      {},
      alignments.map((alignment, index) => element(tag, { className: alignment }, inline(texts[index] ?? ""))),
    );
  };
  return element(
    "div",
    { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" },
    element(
      "table",
      {},
      element("thead", {}, row(lines[0], "th")),
      element(
        "tbody",
        {},
        lines.slice(2).map((line) => row(line, "td")),
      ),
    ),
  );
}

/** The cells of a row; a pipe with a backslash before it is part of its cell. */
function cells(line) {
  const bare = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
