// All layers and heads at once, a small map each; click or Enter opens one large.
// Knows no server: asks for a few layers at a time by the function it is given, and draws as they come.

import { heatLegend, paintMatrix } from "./colours.js";
import { element } from "./dom.js";
import { walked } from "./elements.js";
import { matrixOf } from "./explanation.js";

/** An empty grid of `layers` x `heads` maps; `opened(layer, head)` is called for the one that is chosen. */
export function emptyGrid(layers, heads, opened) {
  const top = element("tr", {}, element("td"), ...count(heads).map((head) => element("th", { scope: "col" }, String(head))));
  const maps = [];
  const lines = count(layers).map((layer) => {
    const line = element("tr", {}, element("th", { scope: "row" }, String(layer)));
    for (const head of count(heads)) {
      maps.push(smallMap(layer, head, opened));
      line.append(element("td", {}, maps.at(-1)));
    }
    return line;
  });
  const hint = element("p", { class: "attn-note" }, "Rows are layers, columns are heads. Choose a map to see it large.");
  const named = { class: "attn-grid", "aria-label": "Attention of every layer and head" };
  const table = element("table", named, element("thead", {}, top), element("tbody", {}, ...lines));
  walked(table, maps, heads);
  return { node: element("div", {}, hint, element("div", { class: "attn-scroll" }, table), heatLegend()), maps };
}

const count = (number) => Array.from({ length: number }, (_, index) => index);

function smallMap(layer, head, opened) {
  const name = `Layer ${layer}, head ${head}`;
  const data = { "data-layer": layer, "data-head": head, "data-key": name };
  const onclick = () => opened(layer, head);
  return element("button", { type: "button", class: "attn-map", "aria-label": name, title: name, ...data, onclick });
}

/** Draws those maps that `entry` of the explanation has. */
export function fillGrid(grid, explanation, entry) {
  for (const map of grid.maps) {
    const [layer, head] = [Number(map.dataset.layer), Number(map.dataset.head)];
    if (!entry.layers.includes(layer) || !entry.heads.includes(head)) continue;
    const canvas = element("canvas", { "aria-hidden": "true" });
    map.replaceChildren(canvas);
    paintMatrix(canvas, matrixOf(explanation, entry, layer, head));
  }
}
