// Parts that the views of attention are put together of: fields, rows of choices, lists that arrow keys walk.
// Knows no explanation.

import { element, unique } from "./dom.js";

/** A select with its label; `options` are [value, text] pairs, `picked` is called with the value. */
export function choice(label, options, chosen, picked) {
  const select = element("select", { "data-key": label, onchange: (event) => picked(event.target.value) });
  for (const [value, text] of options) {
    const selected = String(value) === String(chosen);
    select.append(element("option", { value, selected }, text));
  }
  return labelled(label, select);
}

/** An input with its label; `picked` is called with the value when it has been changed. */
export function field(label, attributes, picked) {
  const onchange = (event) => picked(event.target.value);
  return labelled(label, element("input", { "data-key": label, ...attributes, onchange }));
}

function labelled(text, control) {
  control.id = unique("attention");
  return element("div", { class: "attn-field" }, element("label", { for: control.id }, text), control);
}

/** One of a few: buttons side by side, of which one is on; arrow keys go from one to the next. */
export function segments(label, options, chosen, picked) {
  const name = unique("choice");
  const set = element("fieldset", { class: "attn-segments" }, element("legend", {}, label));
  for (const [value, text] of options) {
    const checked = value === chosen;
    const data = { value, checked, "data-key": `${label} ${value}` };
    const input = element("input", { type: "radio", name, ...data, onchange: () => picked(value) });
    set.append(element("label", {}, input, element("span", {}, text)));
  }
  return set;
}

/**
 * Arrow keys walk the elements that `list` holds, `width` to a row; one of them at a time is in the order of tabs, at
 * first the one with index `first`.
 */
export function walked(root, list, width = 1, first = 0) {
  const sideways = width === 1;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: sideways ? 1 : width, ArrowUp: sideways ? -1 : -width };
  let current = first;
  const rest = (index) => {
    list[current]?.setAttribute("tabindex", "-1");
    current = index;
    list[current]?.setAttribute("tabindex", "0");
  };
  list.forEach((item) => item.setAttribute("tabindex", "-1"));
  rest(first);
  root.addEventListener("focusin", (event) => {
    const index = list.indexOf(event.target.closest("[tabindex]"));
    if (index >= 0) rest(index);
  });
  root.addEventListener("keydown", (event) => {
    const next = landing(event, current, list.length, width, steps);
    if (next === undefined || !list.includes(event.target)) return;
    event.preventDefault();
    list[next].focus();
  });
}

function landing(event, current, count, width, steps) {
  if (event.altKey || event.metaKey) return undefined;
  const line = current - (current % width);
  const ends = width === 1 || event.ctrlKey ? [0, count - 1] : [line, line + width - 1];
  if (event.key === "Home") return ends[0];
  if (event.key === "End") return Math.min(ends[1], count - 1);
  const step = steps[event.key];
  if (step === undefined) return undefined;
  const next = current + step;
  const leaves = width > 1 && Math.abs(step) === 1 && Math.floor(next / width) !== Math.floor(current / width);
  return next < 0 || next >= count || leaves ? undefined : next;
}

/** Runs `change`, which makes the children of `root` anew, and gives the one that had the focus its focus back. */
export function keepingFocus(root, change) {
  const key = root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  change();
  if (key !== undefined) root.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

/** A line that says what is pointed at; read aloud when it changes. */
export function readout(text) {
  return element("output", { class: "attn-readout", "aria-live": "polite" }, text);
}
