// A grid with a small heatmap for every layer and head; click or Enter opens one in full size.

import { scaleLegend, paintMatrix } from "./colours.js";
import { element } from "./dom.js";
import { addArrowKeys } from "./elements.js";
import { headMatrix } from "./explanation.js";

/** An empty grid of `layers` x `heads` maps; `onOpen(layer, head)` is called for the selected one. */
export function emptyGrid(layers, heads, onOpen) {
  const headRow = element("tr", {}, element("td"), ...count(heads).map((head) => element("th", { scope: "col" }, String(head))));
  const maps = [];
  const layerRows = count(layers).map((layer) => {
    const row = element("tr", {}, element("th", { scope: "row" }, String(layer)));
    for (const head of count(heads)) {
      maps.push(smallMap(layer, head, onOpen));
      row.append(element("td", {}, maps.at(-1)));
    }
    return row;
  });
  const hint = element("p", { class: "attn-note" }, "Rows are layers, columns are heads. Select a map to see it in full size.");
  const attributes = { class: "attn-grid", "aria-label": "Attention of every layer and head" };
  const table = element("table", attributes, element("thead", {}, headRow), element("tbody", {}, ...layerRows));
  addArrowKeys(table, maps, heads);
  return { node: element("div", {}, hint, element("div", { class: "attn-scroll" }, table), scaleLegend()), maps };
}

const count = (number) => Array.from({ length: number }, (_, index) => index);

function smallMap(layer, head, onOpen) {
  const name = `Layer ${layer}, head ${head}`;
  const data = { "data-layer": layer, "data-head": head, "data-key": name };
  const onclick = () => onOpen(layer, head);
  return element("button", { type: "button", class: "attn-map", "aria-label": name, title: name, ...data, onclick });
}

/** Draws the maps of the layers and heads in `entry` of the explanation. */
export function fillGrid(grid, explanation, entry) {
  for (const map of grid.maps) {
    const [layer, head] = [Number(map.dataset.layer), Number(map.dataset.head)];
    if (!entry.layers.includes(layer) || !entry.heads.includes(head)) continue;
    const canvas = element("canvas", { "aria-hidden": "true" });
    map.replaceChildren(canvas);
    paintMatrix(canvas, headMatrix(explanation, entry, layer, head));
  }
}
