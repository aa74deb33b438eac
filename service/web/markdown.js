// Markdown as elements.
//
// A library splits the text into tokens; the elements are built here, from a list of those that are allowed. No markup is
// ever parsed, so HTML in an answer is shown as text, and an image is a link: nothing is loaded from another origin.

import { copyText, element } from "./dom.js";
import { lexer } from "./vendor/marked.js";

const OPTIONS = { gfm: true, breaks: true };
const LINK = /^(https?:|mailto:)/i;
const MAX_HEADING = 6;
const COPIED_MS = 1500;
const RUN = /\S+|[^\S\n]+/g;
const MAX_RUN = 2000; // characters; the library's time grows with the square of the length of a run

// Text that grows: a block is drawn again only if it has changed. Text that would keep the page busy, or that is nested
// deeper than the stack of the browser, is shown as it is.
export class MarkdownText {
  constructor(place) {
    this.place = place;
    this.drawn = []; // the source of each block; each has one child node of `place`
    this.isVerbatim = false;
  }

  show(text) {
    this.isVerbatim ||= hasLongRun(text);
    try {
      if (!this.isVerbatim) this.draw(text);
    } catch { // of the stack; browsers name that error differently
      this.isVerbatim = true;
    }
    if (this.isVerbatim) this.place.replaceChildren(element("p", { class: "verbatim" }, text));
  }

  draw(text) {
    const blocks = lexer(text, OPTIONS);
    let kept = 0;
    while (kept < this.drawn.length && this.drawn[kept] === blocks[kept]?.raw) kept += 1;
    while (this.place.childNodes.length > kept) this.place.lastChild.remove();
    for (const block of blocks.slice(kept)) this.place.append(blockNode(block));
    this.drawn = blocks.map((block) => block.raw);
  }
}

// Whether a text has a very long word, or so many spaces in a line.
function hasLongRun(text) {
  for (const [run] of text.matchAll(RUN)) if (run.length > MAX_RUN) return true;
  return false;
}

const BLOCKS = {
  space: () => "",
  def: () => "",
  hr: () => element("hr"),
  heading: ({ depth, tokens }) => element(`h${Math.min(depth + 2, MAX_HEADING)}`, {}, ...inline(tokens)),
  paragraph: ({ tokens }) => element("p", {}, ...inline(tokens)),
  text: ({ tokens, text }) => element("span", {}, ...(tokens ? inline(tokens) : [text])),
  code: ({ lang, text }) => codeBlock(lang ?? "", text),
  blockquote: ({ tokens }) => element("blockquote", {}, ...tokens.map(blockNode)),
  list: ({ ordered, start, items }) =>
    element(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, ...items.map(({ tokens }) => element("li", {}, ...tokens.map(blockNode)))),
  table: ({ header, rows }) => table(header, rows),
};

const INLINE = {
  text: ({ tokens, text }) => (tokens ? element("span", {}, ...inline(tokens)) : text),
  escape: ({ text }) => text,
  strong: ({ tokens }) => element("strong", {}, ...inline(tokens)),
  em: ({ tokens }) => element("em", {}, ...inline(tokens)),
  del: ({ tokens }) => element("del", {}, ...inline(tokens)),
  codespan: ({ text }) => element("code", {}, text),
  br: () => element("br"),
  link: ({ href, tokens, raw }) => link(href, inline(tokens), raw),
  image: ({ href, text, raw }) => link(href, [text || href], raw),
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
};

// The node of a block; of a kind that is not allowed, its source as text.
function blockNode(block) {
  const node = (BLOCKS[block.type] ?? INLINE[block.type])?.(block) ?? element("p", {}, block.raw);
  return typeof node === "string" ? document.createTextNode(node) : node;
}

function inline(tokens) {
  return tokens.map((token) => INLINE[token.type]?.(token) ?? token.raw);
}

function link(href, content, source) {
  if (!LINK.test(href)) return source;
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...content);
}

function table(header, rows) {
  const cells = (name, row) => element("tr", {}, ...row.map(({ tokens }) => element(name, {}, ...inline(tokens))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    element("table", { class: "plain" }, element("thead", {}, cells("th", header)), element("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

function codeBlock(language, text) {
  const code = element("code", {}, text);
  return element("div", { class: "code" },
    element("div", { class: "row" }, element("span", { class: "hint" }, language), copyButton(() => text)),
    element("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, code));
}

// A button that copies the text of `read()`.
export function copyButton(read, name = "Copy") {
  const button = element("button", { type: "button", class: "quiet small", onclick: copy }, name);
  async function copy() {
    button.textContent = await copyText(read()) ? "Copied" : "The browser permits no copying";
    setTimeout(() => { button.textContent = name; }, COPIED_MS);
  }
  return button;
}
