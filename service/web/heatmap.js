// A matrix of weights as a heatmap with tokens along both sides; arrow keys move from cell to cell.
// A small matrix is a table. A larger one is a scaled canvas with one pixel per cell, because ten thousand elements
// would make the page slow.

import { cellColours, scaleLegend, paintMatrix } from "./colours.js";
import { element } from "./dom.js";
import { readout, addArrowKeys } from "./elements.js";
import { formatNumber, displayText, weightAt } from "./explanation.js";

const MAX_TABLE_SIDE = 40; // tokens per side of a table
const WEIGHT_DIGITS = 6; // digits of the weight under the pointer
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Draws `matrix` into `container`; `words` are {label, verb}: its name, and the verb between a row and a column. */
export function drawMatrix(container, matrix, words) {
  const line = readout("Point at a cell, or move with the arrow keys.");
  const frame = element("div", { class: "attn-matrix" }, line);
  container.replaceChildren(frame);
  const small = Math.max(matrix.rows.length, matrix.columns.length) <= MAX_TABLE_SIDE;
  const onCell = (row, column) => showCell(line, matrix, words, [row, column]);
  const body = element("div", { class: "attn-scroll" });
  frame.append(body, scaleLegend());
  body.append(small ? table(matrix, words, onCell, cellColours()) : canvasGrid(matrix, words, onCell));
  if (!small) paintMatrix(body.querySelector("canvas"), matrix);
}

function showCell(line, matrix, words, [row, column]) {
  const weight = weightAt(matrix, row, column);
  Object.assign(line.dataset, { row, column, weight });
  const from = element("b", {}, displayText(matrix.rows[row]));
  const to = element("b", {}, displayText(matrix.columns[column]));
  const number = element("span", { class: "attn-number" }, formatNumber(weight, WEIGHT_DIGITS));
  line.replaceChildren(from, ` ${words.verb} `, to, " ", number);
}

function table(matrix, words, onCell, colour) {
  const cells = [];
  const head = element("tr", {}, element("td"), ...matrix.columns.map(columnLabel));
  const rows = matrix.rows.map((token, row) => {
    const line = element("tr", {}, element("th", { scope: "row", title: displayText(token) }, displayText(token)));
    matrix.columns.forEach((_, column) => {
      cells.push(cell(weightAt(matrix, row, column), row, column, colour));
      line.append(cells.at(-1));
    });
    return line;
  });
  const attributes = { role: "grid", class: "attn-table", "aria-label": words.label };
  const grid = element("table", attributes, element("thead", {}, head), element("tbody", {}, ...rows));
  addArrowKeys(grid, cells, matrix.columns.length);
  highlightCells(grid, head, onCell);
  return grid;
}

function columnLabel(token) {
  return element("th", { scope: "col", title: displayText(token) }, element("span", {}, displayText(token)));
}

function cell(weight, row, column, colour) {
  const data = { "data-row": row, "data-column": column, "data-weight": weight };
  const node = element("td", { role: "gridcell", "aria-label": formatNumber(weight, 4), ...data });
  node.style.backgroundColor = colour(weight);
  return node;
}

/** Calls `onCell` for the cell under the pointer or the focus, and highlights its two tokens. */
function highlightCells(grid, head, onCell) {
  let highlighted = [];
  const highlight = (event) => {
    const node = event.target.closest("[data-weight]");
    if (!node) return;
    const [row, column] = [Number(node.dataset.row), Number(node.dataset.column)];
    highlighted.forEach((label) => label.classList.remove("on"));
    highlighted = [node.parentElement.firstElementChild, head.children[column + 1]];
    highlighted.forEach((label) => label.classList.add("on"));
    onCell(row, column);
  };
  grid.addEventListener("pointerover", highlight);
  grid.addEventListener("focusin", highlight);
}

function canvasGrid(matrix, words, onCell) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const cross = element("div", { class: "attn-cross", hidden: true });
  const attributes = { class: "attn-pixels", role: "application", tabindex: "0", "aria-label": words.label };
  const plane = element("div", attributes, canvas, cross);
  const side = (tokens, name) => element("ol", { class: name, "aria-hidden": "true" }, ...tokens.map(sideLabel));
  const columns = side(matrix.columns, "attn-columns");
  const rows = side(matrix.rows, "attn-rows");
  selectCells(plane, matrix, (row, column) => {
    moveCross(cross, matrix, row, column);
    for (const [list, index] of [[rows, row], [columns, column]]) {
      list.querySelector(".on")?.classList.remove("on");
      list.children[index].classList.add("on");
    }
    onCell(row, column);
  });
  const grid = element("div", { class: "attn-plane" }, element("div", { class: "attn-corner" }), columns, rows, plane);
  grid.style.setProperty("--rows", matrix.rows.length);
  grid.style.setProperty("--columns", matrix.columns.length);
  return grid;
}

function sideLabel(token) {
  return element("li", { title: displayText(token) }, displayText(token));
}

function moveCross(cross, matrix, row, column) {
  cross.hidden = false;
  cross.style.left = `${(column / matrix.columns.length) * 100}%`;
  cross.style.top = `${(row / matrix.rows.length) * 100}%`;
}

/** Selects a cell of the canvas by the pointer and the arrow keys. */
function selectCells(plane, matrix, onCell) {
  const [rows, columns] = [matrix.rows.length, matrix.columns.length];
  let current = [0, 0];
  const select = (row, column) => {
    current = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
    onCell(...current);
  };
  plane.addEventListener("focus", () => select(...current));
  plane.addEventListener("pointermove", (event) => {
    const box = plane.getBoundingClientRect();
    const [down, along] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    select(Math.floor(down * rows), Math.floor(along * columns));
  });
  plane.addEventListener("keydown", (event) => {
    const edges = { Home: [current[0], 0], End: [current[0], columns - 1] };
    const step = STEPS[event.key];
    if (step === undefined && edges[event.key] === undefined) return;
    event.preventDefault();
    select(...(edges[event.key] ?? [current[0] + step[0], current[1] + step[1]]));
    plane.querySelector(".attn-cross").scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
