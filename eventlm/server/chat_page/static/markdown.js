// Markdown as DOM nodes, made of text nodes only: what a model writes is never parsed as HTML.
//
// The blocks of CommonMark that models write, with GitHub's tables and strikethrough. Items of lists may be indented by
// any amount. Line breaks are kept. Pictures become links, because the page makes no request to other servers.

import { copyButton, element } from "./dom.js";
import { inline } from "./markdown_inline.js";

/** Quotes and lists within each other; what is deeper is shown as text. */
const MAX_DEPTH = 12;
/** Columns between tab stops, and of indentation that makes a line code. */
const TAB = 4;

// None of them takes quadratic time: no text can match two neighbouring parts in several ways.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE_RULE = /^:?-+:?$/;

/** The parts that a node shows, [{source, kind, node}], so that a growing text renders only what is new. */
const shown = new WeakMap();

/** Show a text in a container. What has not changed since the last time is left as it is. */
export function renderMarkdown(container, text) {
  showBlocks(container, text, 0);
}

function showBlocks(container, text, depth) {
  showParts(container, splitBlocks(text), (source) => parseBlock(source, depth));
}

/**
 * Show sources as the children of a node. `parse` makes of a source {kind, create, fill}: a part that stays of its kind
 * keeps its node, which is filled again, and with it its scroll position, selection and focus.
 */
function showParts(parent, sources, parse) {
  const before = shown.get(parent) ?? [];
  const after = sources.map((source, index) => {
    const old = before[index];
    if (old?.source === source) return old;
    const { kind, create, fill } = parse(source);
    const node = old?.kind === kind ? old.node : create();
    fill(node);
    if (!old) parent.append(node);
    else if (old.node !== node) old.node.replaceWith(node);
    return { source, kind, node };
  });
  for (const { node } of before.slice(after.length)) node.remove();
  shown.set(parent, after);
}

/** The sources of the blocks of a text. */
function splitBlocks(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
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
  if (ITEM.test(line)) return listItems(lines, start).end;
  if (isIndented(line)) return indentedEnd(lines, start);
  if (isTable(lines, start)) return endWhere(lines, start + 2, (each) => !each.trim() || !each.includes("|"));
  return endWhere(lines, start + 1, (each, index) => !each.trim() || interruptsParagraph(lines, index));
}

function endWhere(lines, start, isEnd) {
  let end = start;
  while (end < lines.length && !isEnd(lines[end], end)) end += 1;
  return end;
}

function fenceEnd(lines, start, mark) {
  return Math.min(lines.length, endWhere(lines, start + 1, (line) => isClosing(line, mark)) + 1);
}

function isClosing(line, mark) {
  const bare = line.trim();
  return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
}

/** Without the empty lines after it. */
function indentedEnd(lines, start) {
  let end = endWhere(lines, start, (line) => line.trim() && !isIndented(line));
  while (!lines[end - 1].trim()) end -= 1;
  return end;
}

function quoteEnd(lines, start) {
  const isEnd = (line, index) => !line.trim() || (!QUOTE.test(line) && interruptsParagraph(lines, index));
  return endWhere(lines, start + 1, isEnd);
}

/**
 * Where the items of a list begin, and where it ends. It goes on with items, with lines that are indented, and with
 * further lines of a paragraph.
 */
function listItems(lines, start) {
  const [, indent, marker] = ITEM.exec(lines[start]);
  const nesting = columns(indent) + 2;
  const starts = [];
  let end = start;
  for (;;) {
    const next = endWhere(lines, end, (line) => line.trim());
    if (next === lines.length) break;
    const item = ITEM.exec(lines[next]);
    const isNested = indentOf(lines[next]) >= nesting;
    const isSibling = item && !RULE.test(lines[next]) && kindOf(item[2]) === kindOf(marker);
    const isLazy = next === end && !item && !interruptsParagraph(lines, next);
    if (!isNested && !isSibling && !isLazy) break;
    if (isSibling && !isNested) starts.push(next);
    const fence = FENCE.exec(lines[next].replace(ITEM, "").trimStart());
    end = fence ? fenceEnd(lines, next, fence[1]) : next + 1;
  }
  return { starts, end };
}

function kindOf(marker) {
  return /\d/.test(marker) ? marker.at(-1) : marker;
}

/** How wide a text is at the beginning of a line. */
function columns(text) {
  let width = 0;
  for (const each of text) width += each === "\t" ? TAB - (width % TAB) : 1;
  return width;
}

function indentOf(line) {
  return columns(/^[ \t]*/.exec(line)[0]);
}

function isIndented(line) {
  return indentOf(line) >= TAB;
}

/** A line with so many columns less of indentation. A tab that is cut becomes spaces; any other stays one. */
function outdent(line, width) {
  let cut = 0;
  let column = 0;
  while (column < width && (line[cut] === " " || line[cut] === "\t")) {
    column += line[cut] === "\t" ? TAB - (column % TAB) : 1;
    cut += 1;
  }
  return " ".repeat(Math.max(0, column - width)) + line.slice(cut);
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
  return lines[index].includes("|") && rule.includes("|") && cells(rule).every((cell) => TABLE_RULE.test(cell));
}

function parseBlock(source, depth) {
  const lines = source.split("\n");
  const [line] = lines;
  if (depth > MAX_DEPTH) return leaf("p", [source]);
  const fence = FENCE.exec(line);
  if (fence) return fencedCode(lines, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim();
    return leaf(`h${heading[1].length}`, inline(text.replace(/(?:^|[ \t])#+$/, "").trimEnd()));
  }
  if (RULE.test(line)) return leaf("hr", []);
  if (QUOTE.test(line)) {
    const inner = lines.map((each) => each.replace(QUOTE, "")).join("\n");
    return {
      kind: "blockquote",
      create: () => element("blockquote"),
      fill: (node) => showBlocks(node, inner, depth + 1),
    };
  }
  if (ITEM.test(line)) return list(lines, depth);
  if (isIndented(line)) return codeBlock("", lines.map((each) => outdent(each, TAB)).join("\n"));
  if (isTable(lines, 0)) return table(lines);
  return leaf("p", inline(lines.map((each) => each.trim()).join("\n")));
}

function leaf(tag, children) {
  return { kind: tag, create: () => element(tag), fill: (node) => node.replaceChildren(...children) };
}

function fencedCode(lines, [opening, mark]) {
  const indent = indentOf(lines[0]);
  const isClosed = lines.length > 1 && isClosing(lines.at(-1), mark);
  const code = lines.slice(1, isClosed ? -1 : undefined).map((line) => outdent(line, indent));
  const [language] = lines[0].slice(opening.length).trim().split(/\s/);
  return codeBlock(language, code.join("\n"));
}

function codeBlock(language, text) {
  const create = () => {
    const code = element("code", {}, new Text());
    return element(
      "figure",
      { className: "code" },
      element(
        "figcaption",
        {},
        element("span", {}, language || "text"),
        copyButton("Copy code", () => code.textContent),
      ),
      // A box that scrolls must be reachable with the keyboard.
      element("pre", { tabIndex: 0 }, code),
    );
  };
  return { kind: `code ${language}`, create, fill: (node) => changeText(node.querySelector("code").firstChild, text) };
}

/** Change a text node from where it differs on, so that what is selected before that stays selected. */
function changeText(node, text) {
  const before = node.data;
  let same = 0;
  while (same < before.length && before[same] === text[same]) same += 1;
  node.replaceData(same, before.length - same, text.slice(same));
}

function list(lines, depth) {
  const { starts } = listItems(lines, 0);
  const items = starts.map((start, index) => lines.slice(start, starts[index + 1]).join("\n"));
  const isLoose = !lines.every((line) => line.trim());
  const number = parseInt(ITEM.exec(lines[0])[2], 10);
  return {
    kind: `list ${number}`,
    create: () => (Number.isNaN(number) ? element("ul") : element("ol", { start: number })),
    fill: (node) => {
      node.classList.toggle("loose", isLoose);
      showParts(node, items, (source) => listItem(source, depth));
    },
  };
}

function listItem(source, depth) {
  const [first, ...lines] = source.split("\n");
  const [opening] = ITEM.exec(first);
  const width = columns(opening);
  const inner = [first.slice(opening.length), ...lines.map((line) => outdent(line, width))].join("\n");
  return { kind: "li", create: () => element("li"), fill: (node) => showBlocks(node, inner, depth + 1) };
}

function table([header, rule, ...rows]) {
  const alignments = cells(rule).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const row = (line, tag) => {
    const texts = cells(line);
    const fields = alignments.map((alignment, index) =>
      element(tag, { className: alignment }, inline(texts[index] ?? "")),
    );
    return leaf("tr", fields);
  };
  const create = () => {
    const [head, body] = [element("thead"), element("tbody")];
    showParts(head, [header], (line) => row(line, "th"));
    const properties = { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" };
    return element("div", properties, element("table", {}, head, body));
  };
  const fill = (node) => showParts(node.querySelector("tbody"), rows, (line) => row(line, "td"));
  return { kind: `table ${header}\n${rule}`, create, fill };
}

/** The cells of a row; a pipe with a backslash before it is part of its cell. */
function cells(line) {
  const bare = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
