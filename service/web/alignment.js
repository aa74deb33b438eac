// The alignment of a translation: which source tokens each written token was written from, as the cross-attention has it.
// Knows no request: draws an explanation that has an attention entry of the kind "cross".

import { element } from "./dom.js";
import { choice, keepingFocus } from "./elements.js";
import { attentionOf, meanMatrix } from "./explanation.js";
import { drawMatrix } from "./heatmap.js";

const MEAN = "mean";
const END = { token: "end", special: true };

/** Draws the explanation's cross-attention into `container`: one layer and head of it, or the mean over them. */
export function drawAlignment(container, explanation) {
  const entry = attentionOf(explanation, "cross");
  const controls = element("div", { class: "attn-controls" });
  const drawn = element("div");
  container.replaceChildren(element("div", { class: "attn-alignment" }, controls, drawn));
  const picked = { Layer: MEAN, Head: MEAN };
  const draw = () => {
    const [layers, heads] = [among(entry.layers, picked.Layer), among(entry.heads, picked.Head)];
    keepingFocus(controls, () => controls.replaceChildren(...pickers(entry, picked, draw)));
    const words = { label: "Alignment: written tokens by source tokens", verb: "was written from" };
    drawMatrix(drawn, written(meanMatrix(explanation, entry, layers, heads)), words);
  };
  draw();
}

/**
 * The rows by what was written from them.  A row looks when its token has been read, and writes the next one: the first
 * row, that of the start token, belongs to the first word; the last one's word, if it was to be written, is the end.
 */
function written(matrix) {
  const { rows, columns, values } = matrix;
  if (!rows[0]?.special) return matrix;
  const done = rows.length > 1 && rows.at(-1).special;
  const labels = done ? rows.slice(1) : [...rows.slice(1), END];
  return { rows: labels, columns, values: values.slice(0, labels.length * columns.length) };
}

const among = (all, picked) => (picked === MEAN ? all : [Number(picked)]);

function pickers(entry, picked, draw) {
  const sides = { Layer: entry.layers, Head: entry.heads };
  return Object.entries(sides).filter(([, all]) => all.length > 1).map(([name, all]) => {
    const options = [[MEAN, `mean of ${all.length}`], ...all.map((index) => [index, String(index)])];
    return choice(name, options, picked[name], (value) => {
      picked[name] = value;
      draw();
    });
  });
}
