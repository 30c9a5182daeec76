/** Markdown as elements: what language models write (CommonMark in part, tables, struck text). Elements are made one by
 * one, never from HTML, and links lead to http and https alone: so a text can do nothing. A newline in a paragraph stays
 * one. */

import { element } from "./dom.js";

const DEEPEST = 20;
const FENCE = /^ {0,3}(`{3,}(?!.*`)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +)(?=\S)/;
const BELOW_HEADER = /^:?-+:?$/; // a cell of the line between header and rows
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: an escape
    /(`+)([^`]{1,2000}?)\2(?!`)/, // 2, 3: code
    /\*\*(?=\S)([^]{1,2000}?)(?<=\S)\*\*/, // 4: strong
    /(?<![\w*])\*(?=\S)([^*]{1,2000}?)(?<=\S)\*(?!\*)/, // 5: emphasis
    /(?<!\w)_(?=\S)([^_]{1,2000}?)(?<=\S)_(?!\w)/, // 6: emphasis
    /~~(?=\S)([^~]{1,2000}?)(?<=\S)~~/, // 7: struck
    /\[([^\]]{1,2000})\]\((https?:\/\/[^\s()]+)\)/, // 8, 9: a link
    /(https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?])/, // 10: an address
  ]
    .map((one) => one.source)
    .join("|"),
  "g",
);

const MOST = 50_000; // characters that become elements: a frame must not take longer than people notice

/** The elements of a text, the rest of a very long one as it is. */
export function rendered(text) {
  const rest = text.length > MOST ? [element("p", {}, text.slice(MOST))] : [];
  return [...blocksOf(text.slice(0, MOST), 0), ...rest];
}

/** The blocks of a text, which lies within `depth` quotes and lists. */
function blocksOf(text, depth) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = blockAt(lines, at, depth);
    if (block) found.push(block);
    at = next;
  }
  return found;
}

/** The block that begins with the line `at`, or none where that is blank, and the line after it. */
function blockAt(lines, at, depth) {
  if (!lines[at].trim()) return [null, at + 1];
  const nesting = depth < DEEPEST ? [quoteAt, listAt] : [];
  for (const read of [fenceAt, headingAt, ruleAt, ...nesting, tableAt]) {
    const found = read(lines, at, depth + 1);
    if (found) return found;
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  return [element("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

const interrupts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((one) => one.test(line));

/** Code, to the end of the text where the fence is still open. */
function fenceAt(lines, at) {
  const fence = FENCE.exec(lines[at])?.[1];
  if (!fence) return null;
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = element("code", {}, lines.slice(at + 1, end).join("\n"));
  return [element("pre", { tabIndex: 0 }, code), end + 1];
}

function headingAt(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const level = Math.min(6, found[1].length + 2); // the page has the first two
  let text = found[2].trimEnd();
  while (text.endsWith("#")) text = text.slice(0, -1);
  return [element(`h${level}`, {}, ...inline(text.trimEnd())), at + 1];
}

const ruleAt = (lines, at) => (RULE.test(lines[at]) ? [element("hr"), at + 1] : null);

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return end > at ? [element("blockquote", {}, ...blocksOf(inner.join("\n"), depth)), end] : null;
}

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  for (let item; end < lines.length && (item = ITEM.exec(lines[end])); ) {
    if (isOrdered !== /\d/.test(item[2])) break;
    const [indent, from] = [item[0].length, end];
    end += 1;
    while (end < lines.length && belongs(lines, end, Math.min(indent, 2))) end += 1;
    const inner = lines.slice(from, end).map((line, index) => (index ? dedented(line, indent) : line.slice(indent)));
    items.push(itemOf(blocksOf(inner.join("\n"), depth)));
  }
  const start = isOrdered ? { start: Number.parseInt(first[2], 10) } : {};
  return [element(isOrdered ? "ol" : "ul", start, ...items), end];
}

/** True if a line goes on with an item whose text is `indent` wide or more: it is indented, or blank before such a
 * line or another item, or text right after text. */
function belongs(lines, at, indent) {
  const isIndented = (line) => line !== undefined && line.search(/\S/) >= indent;
  if (!lines[at].trim()) return isIndented(lines[at + 1]) || ITEM.test(lines[at + 1] ?? "");
  return isIndented(lines[at]) || (lines[at - 1].trim() !== "" && !interrupts(lines[at]));
}

const dedented = (line, indent) => line.slice(Math.min(indent, Math.max(0, line.search(/\S|$/))));

/** An item; its first paragraph is its own text. */
function itemOf(blocks) {
  const [first, ...rest] = blocks;
  return element("li", {}, ...(first?.tagName === "P" ? [...first.childNodes, ...rest] : blocks));
}

function tableAt(lines, at) {
  const [header, below] = [lines[at], lines[at + 1]];
  if (!header.includes("|") || !below?.includes("|")) return null;
  if (!cellsOf(below).every((cell) => BELOW_HEADER.test(cell))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) => element("tr", {}, ...cellsOf(line).map((cell) => element(tag, {}, ...inline(cell))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const table = element("table", {}, element("thead", {}, row(header, "th")), element("tbody", {}, ...body));
  return [element("div", { className: "table", tabIndex: 0 }, table), end];
}

const cellsOf = (line) =>
  line
    .trim()
    .replace(/^\||(?<!\\)\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

/** The texts and elements of a line, or of several. */
function inline(text) {
  const found = [];
  let done = 0;
  for (const match of text.matchAll(INLINE)) {
    found.push(text.slice(done, match.index), spanOf(match));
    done = match.index + match[0].length;
  }
  return [...found, text.slice(done)].filter((one) => one !== "");
}

function spanOf([, escaped, , code, strong, starred, underlined, struck, label, target, address]) {
  if (escaped !== undefined) return escaped;
  if (code !== undefined) return element("code", {}, code);
  if (strong !== undefined) return element("strong", {}, ...inline(strong));
  if (struck !== undefined) return element("s", {}, ...inline(struck));
  const emphasised = starred ?? underlined;
  if (emphasised !== undefined) return element("em", {}, ...inline(emphasised));
  const link = { href: target ?? address, target: "_blank", rel: "noopener noreferrer" };
  return element("a", link, ...(label === undefined ? [address] : inline(label)));
}
