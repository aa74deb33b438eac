// A matrix of weights as a heatmap with tokens along both sides; arrow keys go from cell to cell.
// Knows no request and no model.  Small ones are tables, whose cells are elements; larger ones are one canvas with a
// pixel a cell, blown up, since ten thousand elements would make the page slow.

import { heat, heatLegend, paintMatrix } from "./colours.js";
import { element } from "./dom.js";
import { readout, walked } from "./elements.js";
import { figure, readable, weightAt } from "./explanation.js";

const MOST_ELEMENTS = 40; // tokens on a side
const EXACT = 6; // digits of the weight that is pointed at
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Draws `matrix` into `container`; `words` are {label, verb}: what it is, and what a row does with a column. */
export function drawMatrix(container, matrix, words) {
  const line = readout("Point at a cell, or walk with the arrow keys.");
  const frame = element("div", { class: "attn-matrix" }, line);
  container.replaceChildren(frame);
  const small = Math.max(matrix.rows.length, matrix.columns.length) <= MOST_ELEMENTS;
  const tell = (row, column) => say(line, matrix, words, [row, column]);
  const body = element("div", { class: "attn-scroll" });
  frame.append(body, heatLegend());
  body.append(small ? table(matrix, words, tell, heat()) : pixels(matrix, words, tell));
  if (!small) paintMatrix(body.querySelector("canvas"), matrix);
}

function say(line, matrix, words, [row, column]) {
  const weight = weightAt(matrix, row, column);
  Object.assign(line.dataset, { row, column, weight });
  const from = element("b", {}, readable(matrix.rows[row]));
  const to = element("b", {}, readable(matrix.columns[column]));
  const number = element("span", { class: "attn-number" }, figure(weight, EXACT));
  line.replaceChildren(from, ` ${words.verb} `, to, " ", number);
}

function table(matrix, words, tell, colour) {
  const cells = [];
  const head = element("tr", {}, element("td"), ...matrix.columns.map(columnLabel));
  const rows = matrix.rows.map((token, row) => {
    const line = element("tr", {}, element("th", { scope: "row", title: readable(token) }, readable(token)));
    matrix.columns.forEach((_, column) => {
      cells.push(cell(weightAt(matrix, row, column), row, column, colour));
      line.append(cells.at(-1));
    });
    return line;
  });
  const attributes = { role: "grid", class: "attn-table", "aria-label": words.label };
  const grid = element("table", attributes, element("thead", {}, head), element("tbody", {}, ...rows));
  walked(grid, cells, matrix.columns.length);
  pointed(grid, head, tell);
  return grid;
}

function columnLabel(token) {
  return element("th", { scope: "col", title: readable(token) }, element("span", {}, readable(token)));
}

function cell(weight, row, column, colour) {
  const data = { "data-row": row, "data-column": column, "data-weight": weight };
  const node = element("td", { role: "gridcell", "aria-label": figure(weight, 4), ...data });
  node.style.backgroundColor = colour(weight);
  return node;
}

/** The cell under the pointer or the focus is told, and its two tokens stand out. */
function pointed(grid, head, tell) {
  let marked = [];
  const mark = (event) => {
    const node = event.target.closest("[data-weight]");
    if (!node) return;
    const [row, column] = [Number(node.dataset.row), Number(node.dataset.column)];
    marked.forEach((label) => label.classList.remove("on"));
    marked = [node.parentElement.firstElementChild, head.children[column + 1]];
    marked.forEach((label) => label.classList.add("on"));
    tell(row, column);
  };
  grid.addEventListener("pointerover", mark);
  grid.addEventListener("focusin", mark);
}

function pixels(matrix, words, tell) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const cross = element("div", { class: "attn-cross", hidden: true });
  const attributes = { class: "attn-pixels", role: "application", tabindex: "0", "aria-label": words.label };
  const plane = element("div", attributes, canvas, cross);
  const side = (tokens, name) => element("ol", { class: name, "aria-hidden": "true" }, ...tokens.map(sideLabel));
  const columns = side(matrix.columns, "attn-columns");
  const rows = side(matrix.rows, "attn-rows");
  steered(plane, matrix, (row, column) => {
    place(cross, matrix, row, column);
    for (const [list, index] of [[rows, row], [columns, column]]) {
      list.querySelector(".on")?.classList.remove("on");
      list.children[index].classList.add("on");
    }
    tell(row, column);
  });
  const whole = element("div", { class: "attn-plane" }, element("div", { class: "attn-corner" }), columns, rows, plane);
  whole.style.setProperty("--rows", matrix.rows.length);
  whole.style.setProperty("--columns", matrix.columns.length);
  return whole;
}

function sideLabel(token) {
  return element("li", { title: readable(token) }, readable(token));
}

function place(cross, matrix, row, column) {
  cross.hidden = false;
  cross.style.left = `${(column / matrix.columns.length) * 100}%`;
  cross.style.top = `${(row / matrix.rows.length) * 100}%`;
}

/** The pointer and the arrow keys choose a cell of the canvas. */
function steered(plane, matrix, chosen) {
  const [rows, columns] = [matrix.rows.length, matrix.columns.length];
  let at = [0, 0];
  const go = (row, column) => {
    at = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
    chosen(...at);
  };
  plane.addEventListener("focus", () => go(...at));
  plane.addEventListener("pointermove", (event) => {
    const box = plane.getBoundingClientRect();
    const [down, along] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    go(Math.floor(down * rows), Math.floor(along * columns));
  });
  plane.addEventListener("keydown", (event) => {
    const edges = { Home: [at[0], 0], End: [at[0], columns - 1] };
    const step = STEPS[event.key];
    if (step === undefined && edges[event.key] === undefined) return;
    event.preventDefault();
    go(...(edges[event.key] ?? [at[0] + step[0], at[1] + step[1]]));
    plane.querySelector(".attn-cross").scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
