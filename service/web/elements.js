// Controls of the attention views: fields, radio buttons, lists with arrow keys.

import { element, uniqueId } from "./dom.js";

/** A select with its label; `options` are [value, text] pairs, `current` is the selected value, `onPick` is called with another. */
export function choice(label, options, current, onPick) {
  const select = element("select", { "data-key": label, onchange: (event) => onPick(event.target.value) });
  for (const [value, text] of options) {
    const selected = String(value) === String(current);
    select.append(element("option", { value, selected }, text));
  }
  return labelledField(label, select);
}

/** An input with its label; `onPick` is called with the value when it has changed. */
export function field(label, attributes, onPick) {
  const onchange = (event) => onPick(event.target.value);
  return labelledField(label, element("input", { "data-key": label, ...attributes, onchange }));
}

function labelledField(text, control) {
  control.id = uniqueId("attention");
  return element("div", { class: "attn-field" }, element("label", { for: control.id }, text), control);
}

/** A row of radio buttons with a legend. */
export function segments(label, options, current, onPick) {
  const name = uniqueId("choice");
  const set = element("fieldset", { class: "attn-segments" }, element("legend", {}, label));
  for (const [value, text] of options) {
    const checked = value === current;
    const data = { value, checked, "data-key": `${label} ${value}` };
    const input = element("input", { type: "radio", name, ...data, onchange: () => onPick(value) });
    set.append(element("label", {}, input, element("span", {}, text)));
  }
  return set;
}

/**
 * Arrow keys move the focus between the elements of `list`, which has `width` elements per row. One element at a time is
 * in the tab order, initially the one with index `first`.
 */
export function addArrowKeys(root, list, width = 1, first = 0) {
  const sideways = width === 1;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: sideways ? 1 : width, ArrowUp: sideways ? -1 : -width };
  let current = first;
  const setCurrent = (index) => {
    list[current]?.setAttribute("tabindex", "-1");
    current = index;
    list[current]?.setAttribute("tabindex", "0");
  };
  list.forEach((item) => item.setAttribute("tabindex", "-1"));
  setCurrent(first);
  root.addEventListener("focusin", (event) => {
    const index = list.indexOf(event.target.closest("[tabindex]"));
    if (index >= 0) setCurrent(index);
  });
  root.addEventListener("keydown", (event) => {
    const next = nextIndex(event, current, list.length, width, steps);
    if (next === undefined || !list.includes(event.target)) return;
    event.preventDefault();
    list[next].focus();
  });
}

function nextIndex(event, current, count, width, steps) {
  if (event.altKey || event.metaKey) return undefined;
  const rowStart = current - (current % width);
  const ends = width === 1 || event.ctrlKey ? [0, count - 1] : [rowStart, rowStart + width - 1];
  if (event.key === "Home") return ends[0];
  if (event.key === "End") return Math.min(ends[1], count - 1);
  const step = steps[event.key];
  if (step === undefined) return undefined;
  const next = current + step;
  const leavesRow = width > 1 && Math.abs(step) === 1 && Math.floor(next / width) !== Math.floor(current / width);
  return next < 0 || next >= count || leavesRow ? undefined : next;
}

/** Runs `change`, which replaces the children of `root`, and restores the focus by the children's `data-key`. */
export function keepFocus(root, change) {
  const key = root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  change();
  if (key !== undefined) root.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

/** A line that describes the element under the pointer; screen readers announce its changes. */
export function readout(text) {
  return element("output", { class: "attn-readout", "aria-live": "polite" }, text);
}
