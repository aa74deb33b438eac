// Which colour a weight has, and which a head: the same in every view, in light and in dark.
// Knows no explanation.  Weights are shaded by their square root: one scale from 0 to 1 for all heads on which what looks
// everywhere (1 / tokens each) can still be seen beside what looks at one place.

import { element } from "./dom.js";

const SHADES = 256;
const GOLDEN_ANGLE = 137.508; // hues so far apart stay apart, however many heads there are
const TICKS = [0, 0.01, 0.1, 0.25, 0.5, 1];

/** How far along the scale a weight is, from 0 to 1. */
export function shade(weight) {
  return Math.sqrt(Math.min(Math.max(weight, 0), 1));
}

/** Gives the element the hue of a head; the style sheet makes a colour of it that suits the scheme. */
export function paintHead(node, head) {
  node.style.setProperty("--hue", ((head * GOLDEN_ANGLE + 250) % 360).toFixed(1));
  return node;
}

/** The scale's colours as bytes, [256 x red, green, blue, alpha]: those of the scheme of the moment. */
function scale() {
  const style = getComputedStyle(document.documentElement);
  const context = Object.assign(document.createElement("canvas"), { width: SHADES, height: 1 }).getContext("2d");
  const gradient = context.createLinearGradient(0, 0, SHADES, 0);
  ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].forEach((name, index, all) => {
    gradient.addColorStop(index / (all.length - 1), style.getPropertyValue(name).trim());
  });
  context.fillStyle = gradient;
  context.fillRect(0, 0, SHADES, 1);
  return context.getImageData(0, 0, SHADES, 1).data;
}

/** Calls `repaint` whenever the page goes from light to dark or back: what is painted does not change by itself. */
export function onScheme(repaint) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["class", "data-theme", "style"] });
}

/** Paints a matrix on a canvas, one pixel a cell. */
export function paintMatrix(canvas, matrix) {
  canvas.width = matrix.columns.length;
  canvas.height = matrix.rows.length;
  const colours = scale();
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  matrix.values.forEach((weight, cell) => {
    const from = Math.round(shade(weight) * (SHADES - 1)) * 4;
    image.data.set(colours.subarray(from, from + 4), cell * 4);
  });
  context.putImageData(image, 0, 0);
}

/** Colours of cells that are elements: a function from a weight to a colour. */
export function heat() {
  const colours = scale();
  return (weight) => {
    const from = Math.round(shade(weight) * (SHADES - 1)) * 4;
    return `rgb(${colours[from]} ${colours[from + 1]} ${colours[from + 2]})`;
  };
}

/** The scale with its numbers. */
export function heatLegend() {
  const marks = TICKS.map((tick) => {
    const mark = element("span", {}, String(tick));
    mark.style.left = `${shade(tick) * 100}%`;
    return mark;
  });
  const bar = element("div", { class: "attn-scale-bar" });
  const label = "Weight, shaded by its square root: darker or brighter is more";
  return element("div", { class: "attn-scale", role: "img", "aria-label": label }, bar, element("div", {}, ...marks));
}
