// Colours of weights and of heads: the same in every view, in the light and the dark scheme.
// Weights are shaded by their square root. There is one scale from 0 to 1 for all heads; on it the small weights of a
// head that attends to all tokens are still visible.

import { element } from "./dom.js";

const SHADES = 256;
const GOLDEN_ANGLE = 137.508; // degrees between the hues of two heads; the hues stay distinct for any number of heads
const TICKS = [0, 0.01, 0.1, 0.25, 0.5, 1];

/** The position of a weight on the colour scale, from 0 to 1. */
export function scalePosition(weight) {
  return Math.sqrt(Math.min(Math.max(weight, 0), 1));
}

/** Sets the hue of a head on the element; the style sheet makes a colour of it for the current scheme. */
export function paintHead(node, head) {
  node.style.setProperty("--hue", ((head * GOLDEN_ANGLE + 250) % 360).toFixed(1));
  return node;
}

/** The scale's colours in the current scheme as bytes, [256 x red, green, blue, alpha]. */
function scaleColours() {
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

/** Calls `repaint` when the colour scheme changes: a canvas keeps its old colours. */
export function onSchemeChange(repaint) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["class", "data-theme", "style"] });
}

/** Paints a matrix on a canvas, one pixel per cell. */
export function paintMatrix(canvas, matrix) {
  canvas.width = matrix.columns.length;
  canvas.height = matrix.rows.length;
  const colours = scaleColours();
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  matrix.values.forEach((weight, cell) => {
    const offset = Math.round(scalePosition(weight) * (SHADES - 1)) * 4;
    image.data.set(colours.subarray(offset, offset + 4), cell * 4);
  });
  context.putImageData(image, 0, 0);
}

/** A function from a weight to a CSS colour, for cells that are elements. */
export function cellColours() {
  const colours = scaleColours();
  return (weight) => {
    const offset = Math.round(scalePosition(weight) * (SHADES - 1)) * 4;
    return `rgb(${colours[offset]} ${colours[offset + 1]} ${colours[offset + 2]})`;
  };
}

/** The scale with its numbers. */
export function scaleLegend() {
  const marks = TICKS.map((tick) => {
    const mark = element("span", {}, String(tick));
    mark.style.left = `${scalePosition(tick) * 100}%`;
    return mark;
  });
  const bar = element("div", { class: "attn-scale-bar" });
  const label = "Colour scale of the weights: a stronger colour is a larger weight";
  return element("div", { class: "attn-scale", role: "img", "aria-label": label }, bar, element("div", {}, ...marks));
}
