// Figures as bars: a list whose rows say name and number, and show them.

import { element, toned } from "./dom.js";

// `rows` are {name, share (0 to 1), figure, onclick, pressed}; with `onclick` a row is a button.
export function bars(rows, label) {
  return element("ol", { class: "bars", "aria-label": label }, ...rows.map(row));
}

function row({ name, share, figure, onclick, top }) {
  const inside = [
    element("span", { class: "name" }, name),
    toned(element("span", { class: "meter" }), "--share", Math.max(0, Math.min(1, share)).toFixed(4)),
    element("span", { class: "figure" }, figure),
  ];
  const content = onclick ? [element("button", { type: "button", onclick }, ...inside)] : inside;
  return element("li", { class: top ? "top" : "" }, ...content);
}
