// The alignment of a translation: the cross-attention weights of each generated token over the source tokens.
// Input: an explanation that has an attention entry of the kind "cross".

import { element } from "./dom.js";
import { choice, keepFocus } from "./elements.js";
import { findAttention, meanMatrix } from "./explanation.js";
import { drawMatrix } from "./heatmap.js";

const MEAN = "mean";
const END_TOKEN = { token: "end", special: true };

/** Draws the explanation's cross-attention into `container`: one layer and head, or the mean over them. */
export function drawAlignment(container, explanation) {
  const entry = findAttention(explanation, "cross");
  const fields = element("div", { class: "attn-controls" });
  const matrixNode = element("div");
  container.replaceChildren(element("div", { class: "attn-alignment" }, fields, matrixNode));
  const selection = { Layer: MEAN, Head: MEAN };
  const redraw = () => {
    const [layers, heads] = [selectIndexes(entry.layers, selection.Layer), selectIndexes(entry.heads, selection.Head)];
    keepFocus(fields, () => fields.replaceChildren(...selectors(entry, selection, redraw)));
    const words = { label: "Alignment: generated tokens by source tokens", verb: "was generated from" };
    drawMatrix(matrixNode, generatedRows(meanMatrix(explanation, entry, layers, heads)), words);
  };
  redraw();
}

/**
 * The matrix with each row labelled by the token that was generated from it. A row has the weights after its token was
 * read, and the next token is generated from them: the row of the start token belongs to the first generated token. The
 * last row, if there is one more, belongs to the end token.
 */
function generatedRows(matrix) {
  const { rows, columns, values } = matrix;
  if (!rows[0]?.special) return matrix;
  const hasEnd = rows.length > 1 && rows.at(-1).special;
  const labels = hasEnd ? rows.slice(1) : [...rows.slice(1), END_TOKEN];
  return { rows: labels, columns, values: values.slice(0, labels.length * columns.length) };
}

const selectIndexes = (indexes, value) => (value === MEAN ? indexes : [Number(value)]);

function selectors(entry, selection, redraw) {
  const dimensions = { Layer: entry.layers, Head: entry.heads };
  return Object.entries(dimensions).filter(([, indexes]) => indexes.length > 1).map(([name, indexes]) => {
    const options = [[MEAN, `mean of ${indexes.length}`], ...indexes.map((index) => [index, String(index)])];
    return choice(name, options, selection[name], (value) => {
      selection[name] = value;
      redraw();
    });
  });
}
