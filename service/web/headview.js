// The head view: the tokens in two columns, and lines from every token to those it attends to. The opacity of a line is
// its weight; each head has a colour. After BertViz (Vig 2019, https://arxiv.org/abs/1906.05714).
//
// While the pointer is on a token, only its lines are drawn, with the opacity of the heatmap's scale. The lines of a head
// that attends to all tokens would be too faint to see otherwise.

import { paintHead, scalePosition } from "./colours.js";
import { svgElement, element } from "./dom.js";
import { readout, addArrowKeys } from "./elements.js";
import { formatNumber, displayText, rowWeights, weightAt } from "./explanation.js";

const MAX_LINES = 4000; // lines above which faint ones are hidden
const MIN_WEIGHT = 0.01; // smallest weight that is drawn if there are more than MAX_LINES lines
const NAMED_TOKENS = 4; // tokens in the description of the token under the pointer

/** Draws `heads` ([{head, matrix}], all of one layer and the same tokens) into `container`. */
export function drawHeads(container, heads) {
  const { rows, columns } = heads[0].matrix;
  const line = readout("Point at a token to see only its lines; Enter pins them.");
  const lines = weightLines(heads, rows.length, columns.length);
  const left = column(rows, "from", "Query tokens");
  const right = column(columns, "to", "Key tokens");
  const sides = element("div", { class: "attn-sides" }, left, lines, right);
  const note = hidesFaintLines(heads) ? `Weights below ${MIN_WEIGHT} are drawn only for the token under the pointer.` : "";
  const noteNode = element("p", { class: "attn-note" }, note);
  container.replaceChildren(element("div", { class: "attn-headview" }, sides, line, noteNode));
  highlightTokens(sides, { heads, left, right, lines, line });
}

const hidesFaintLines = (heads) => heads.length * heads[0].matrix.values.length > MAX_LINES;

function column(tokens, side, label) {
  const buttons = tokens.map((token, index) => {
    const special = token.special ? " special" : "";
    const data = { "data-side": side, "data-index": index, "aria-pressed": "false" };
    return element("button", { type: "button", class: `attn-token${special}`, ...data }, displayText(token));
  });
  const list = element("ol", { class: `attn-column ${side}`, "aria-label": label });
  list.append(...buttons.map((button) => element("li", {}, element("span", { class: "attn-shares" }), button)));
  addArrowKeys(list, buttons);
  return list;
}

function weightLines(heads, rows, columns) {
  const height = Math.max(rows, columns);
  const box = { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const svg = svgElement("svg", { class: "attn-lines", ...box });
  svg.style.setProperty("--rows", height);
  const minimum = hidesFaintLines(heads) ? MIN_WEIGHT : 0;
  for (const { head, matrix } of heads) {
    const group = paintHead(svgElement("g", { class: "attn-of-head", "data-head": head }), head);
    matrix.values.forEach((weight, cell) => {
      if (weight >= minimum) group.append(weightLine(Math.floor(cell / columns), cell % columns, weight));
    });
    svg.append(group);
  }
  return svg;
}

function weightLine(row, column, weight, opacity = weight) {
  const ends = { x1: 0, y1: row + 0.5, x2: 100, y2: column + 0.5 };
  const data = { "data-row": row, "data-column": column, "data-weight": weight };
  return svgElement("line", { ...ends, ...data, "stroke-opacity": opacity.toFixed(4) });
}

/** Shows only the lines of the token that is under the pointer, focused or pinned, and its weights at the other tokens. */
function highlightTokens(sides, view) {
  let pinned = null;
  const show = (button) => (button ? showTokenLines(view, button) : showAllLines(view));
  const button = (event) => event.target.closest("[data-side]");
  sides.addEventListener("pointerover", (event) => show(button(event) ?? pinned));
  sides.addEventListener("pointerleave", () => show(pinned));
  sides.addEventListener("focusin", (event) => show(button(event)));
  sides.addEventListener("focusout", () => show(pinned));
  sides.addEventListener("click", (event) => {
    const clicked = button(event);
    if (!clicked) return;
    pinned?.setAttribute("aria-pressed", "false");
    pinned = pinned === clicked ? null : clicked;
    pinned?.setAttribute("aria-pressed", "true");
    show(pinned);
  });
}

function showAllLines({ lines, left, right }) {
  lines.classList.remove("alone");
  lines.querySelectorAll(".attn-alone").forEach((group) => group.remove());
  for (const list of [left, right]) {
    list.querySelectorAll(".attn-share").forEach((shareBar) => shareBar.remove());
    list.querySelector(".on")?.classList.remove("on");
  }
}

function showTokenLines(view, button) {
  showAllLines(view);
  const { side, index } = button.dataset;
  button.classList.add("on");
  view.lines.classList.add("alone");
  const others = side === "from" ? view.right : view.left;
  for (const { head, matrix } of view.heads) {
    const weights = tokenWeights(matrix, side, Number(index));
    const group = paintHead(svgElement("g", { class: "attn-of-head attn-alone", "data-head": head }), head);
    weights.forEach((weight, other) => {
      const [row, column] = side === "from" ? [index, other] : [other, index];
      group.append(weightLine(Number(row), Number(column), weight));
      others.children[other].firstChild.append(shareBar(head, weight));
    });
    view.lines.append(group);
  }
  describeToken(view, button, side);
}

function tokenWeights(matrix, side, index) {
  return side === "from" ? rowWeights(matrix, index) : matrix.rows.map((_, row) => weightAt(matrix, row, index));
}

function shareBar(head, weight) {
  const node = paintHead(element("span", { class: "attn-share", "data-head": head, "data-weight": weight }), head);
  node.style.setProperty("--share", scalePosition(weight).toFixed(4));
  return node;
}

function describeToken({ heads, line }, button, side) {
  const index = Number(button.dataset.index);
  const parts = heads.map(({ head, matrix }) => {
    const tokens = side === "from" ? matrix.columns : matrix.rows;
    const ranked = tokenWeights(matrix, side, index).map((weight, other) => [weight, displayText(tokens[other])]);
    ranked.sort((one, other) => other[0] - one[0]);
    const names = ranked.slice(0, NAMED_TOKENS).map(([weight, token]) => `${token} ${formatNumber(weight)}`);
    const name = paintHead(element("span", { class: "attn-dot" }), head);
    return element("span", { class: "attn-said" }, name, `head ${head}: ${names.join(", ")}`);
  });
  const verb = side === "from" ? " attends to" : " is attended to by";
  const { rows, columns } = heads[0].matrix;
  const token = side === "from" ? rows[index] : columns[index];
  line.replaceChildren(element("b", {}, displayText(token)), verb, " ", ...parts);
}
