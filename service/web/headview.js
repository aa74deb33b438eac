// The head view: what is read in two columns, and from every token lines to those it looks at, as opaque as the weight;
// a colour for each head.  After BertViz (Vig 2019, https://arxiv.org/abs/1906.05714).
// Knows no request and no model: draws matrices, one a head.
//
// While a token is pointed at, its lines alone are drawn, as opaque as a heatmap's cell is dark: they are few, and where
// a head looks everywhere none of them could be seen otherwise.

import { paintHead, shade } from "./colours.js";
import { drawn, element } from "./dom.js";
import { readout, walked } from "./elements.js";
import { figure, readable, rowOf, weightAt } from "./explanation.js";

const MOST_LINES = 4000; // drawn at once, faint ones among them
const FAINT = 0.01; // the least weight that is drawn where there would be more lines than that
const TOLD = 4; // tokens in the line that says what is looked at

/** Draws `heads` ([{head, matrix}], all of one layer and of the same tokens) into `container`. */
export function drawHeads(container, heads) {
  const { rows, columns } = heads[0].matrix;
  const line = readout("Point at a token to see its lines alone; Enter keeps them.");
  const lines = linesOf(heads, rows.length, columns.length);
  const left = column(rows, "from", "Tokens that look");
  const right = column(columns, "to", "Tokens that are looked at");
  const sides = element("div", { class: "attn-sides" }, left, lines, right);
  const note = cut(heads) ? `Weights below ${FAINT} are drawn only for the token that is pointed at.` : "";
  const below = element("p", { class: "attn-note" }, note);
  container.replaceChildren(element("div", { class: "attn-headview" }, sides, line, below));
  pointing(sides, { heads, left, right, lines, line });
}

const cut = (heads) => heads.length * heads[0].matrix.values.length > MOST_LINES;

function column(tokens, side, label) {
  const buttons = tokens.map((token, index) => {
    const special = token.special ? " special" : "";
    const data = { "data-side": side, "data-index": index, "aria-pressed": "false" };
    return element("button", { type: "button", class: `attn-token${special}`, ...data }, readable(token));
  });
  const list = element("ol", { class: `attn-column ${side}`, "aria-label": label });
  list.append(...buttons.map((button) => element("li", {}, element("span", { class: "attn-shares" }), button)));
  walked(list, buttons);
  return list;
}

function linesOf(heads, rows, columns) {
  const height = Math.max(rows, columns);
  const box = { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const svg = drawn("svg", { class: "attn-lines", ...box });
  svg.style.setProperty("--rows", height);
  const least = cut(heads) ? FAINT : 0;
  for (const { head, matrix } of heads) {
    const group = paintHead(drawn("g", { class: "attn-of-head", "data-head": head }), head);
    matrix.values.forEach((weight, cell) => {
      if (weight >= least) group.append(ray(Math.floor(cell / columns), cell % columns, weight));
    });
    svg.append(group);
  }
  return svg;
}

function ray(row, column, weight, opacity = weight) {
  const ends = { x1: 0, y1: row + 0.5, x2: 100, y2: column + 0.5 };
  const data = { "data-row": row, "data-column": column, "data-weight": weight };
  return drawn("line", { ...ends, ...data, "stroke-opacity": opacity.toFixed(4) });
}

/** What is pointed at, focused or kept shows its lines alone, and the others' tokens how much they have of it. */
function pointing(sides, view) {
  let kept = null;
  const show = (button) => (button ? alone(view, button) : together(view));
  const button = (event) => event.target.closest("[data-side]");
  sides.addEventListener("pointerover", (event) => show(button(event) ?? kept));
  sides.addEventListener("pointerleave", () => show(kept));
  sides.addEventListener("focusin", (event) => show(button(event)));
  sides.addEventListener("focusout", () => show(kept));
  sides.addEventListener("click", (event) => {
    const clicked = button(event);
    if (!clicked) return;
    kept?.setAttribute("aria-pressed", "false");
    kept = kept === clicked ? null : clicked;
    kept?.setAttribute("aria-pressed", "true");
    show(kept);
  });
}

function together({ lines, left, right }) {
  lines.classList.remove("alone");
  lines.querySelectorAll(".attn-alone").forEach((group) => group.remove());
  for (const list of [left, right]) {
    list.querySelectorAll(".attn-share").forEach((share) => share.remove());
    list.querySelector(".on")?.classList.remove("on");
  }
}

function alone(view, button) {
  together(view);
  const { side, index } = button.dataset;
  button.classList.add("on");
  view.lines.classList.add("alone");
  const others = side === "from" ? view.right : view.left;
  for (const { head, matrix } of view.heads) {
    const weights = across(matrix, side, Number(index));
    const group = paintHead(drawn("g", { class: "attn-of-head attn-alone", "data-head": head }), head);
    weights.forEach((weight, other) => {
      const [row, column] = side === "from" ? [index, other] : [other, index];
      group.append(ray(Number(row), Number(column), weight));
      others.children[other].firstChild.append(share(head, weight));
    });
    view.lines.append(group);
  }
  tell(view, button, side);
}

function across(matrix, side, index) {
  return side === "from" ? rowOf(matrix, index) : matrix.rows.map((_, row) => weightAt(matrix, row, index));
}

function share(head, weight) {
  const node = paintHead(element("span", { class: "attn-share", "data-head": head, "data-weight": weight }), head);
  node.style.setProperty("--share", shade(weight).toFixed(4));
  return node;
}

function tell({ heads, line }, button, side) {
  const index = Number(button.dataset.index);
  const parts = heads.map(({ head, matrix }) => {
    const tokens = side === "from" ? matrix.columns : matrix.rows;
    const most = across(matrix, side, index).map((weight, other) => [weight, readable(tokens[other])]);
    most.sort((one, other) => other[0] - one[0]);
    const said = most.slice(0, TOLD).map(([weight, token]) => `${token} ${figure(weight)}`);
    const name = paintHead(element("span", { class: "attn-dot" }), head);
    return element("span", { class: "attn-said" }, name, `head ${head}: ${said.join(", ")}`);
  });
  const verb = side === "from" ? " looks at" : " is looked at by";
  const { rows, columns } = heads[0].matrix;
  const token = side === "from" ? rows[index] : columns[index];
  line.replaceChildren(element("b", {}, readable(token)), verb, " ", ...parts);
}
