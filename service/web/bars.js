// A list of bars: each row has a name, a bar and a number.

import { element, withProperty } from "./dom.js";

// `rows` are {name, share (0 to 1), figure, onclick, top}; with `onclick` a row is a button.
export function bars(rows, label) {
  return element("ol", { class: "bars", "aria-label": label }, ...rows.map(row));
}

function row({ name, share, figure, onclick, top }) {
  const parts = [
    element("span", { class: "name" }, name),
    withProperty(element("span", { class: "meter" }), "--share", Math.max(0, Math.min(1, share)).toFixed(4)),
    element("span", { class: "figure" }, figure),
  ];
  const content = onclick ? [element("button", { type: "button", onclick }, ...parts)] : parts;
  return element("li", { class: top ? "top" : "" }, ...content);
}
