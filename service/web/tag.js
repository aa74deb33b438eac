// What is named in a text, marked in place.
//
// The one idea: places are characters of the text as it was sent, so what is marked is cut out of that text.

import { characters, element, percent } from "./dom.js";
import { area, answerPlace, asking, choice, empty, examples, field, sides } from "./form.js";
import { TAGGED } from "./samples.js";

const HUES = 8;
const GROUPING = { "whole words": "first", "runs of tokens": "simple", "single tokens": "none" };

export function mountTag(container, page) {
  const text = area(TAGGED[0], 5);
  const grouping = choice(Object.keys(GROUPING));
  const place = answerPlace("The text with what is named");
  let target = null;
  let input = "";

  const request = () => ({
    path: `/models/${page.model.id}`,
    body: { inputs: text.value, parameters: { aggregation_strategy: GROUPING[grouping.value] } },
  });

  async function ask({ path, body }, signal) {
    const found = await page.request(path, body, signal);
    [input, target] = [body.inputs, null];
    const hues = huesOf(page.model.labels ?? [], found);
    const chosen = element("p", { class: "hint" }, found.length ? "Choose one and open Attention to see why." : "Nothing is named.");
    place.replaceChildren(marked(body.inputs, found, hues, pick), legend(found, hues), chosen);

    function pick(one, button) {
      for (const each of place.querySelectorAll("mark button")) each.setAttribute("aria-pressed", String(each === button));
      const label = labelOf(one);
      target = { start: one.start, end: one.end, ...(one.entity ? { label } : {}) };
      chosen.textContent = `${one.word}: ${label}, ${percent(one.score)}`;
    }
  }

  const form = asking(page, {
    fields: [field("Text", text), field("Put together", grouping), examples(TAGGED, (each) => { text.value = each; form.submitted(); })],
    button: "Find", request, ask,
  });
  empty(place, "The text appears here, with what is named in it.");
  sides(container, form, place);
  return { asked: () => ({ input: target ? input : text.value, target }), leave: form.leave };
}

function labelOf(found) {
  return found.entity_group ?? found.entity;
}

// Of one kind, whether a token begins it (B-) or goes on with it (I-).
function kindOf(label) {
  return label.replace(/^[BIES]-/, "");
}

// Each kind its colour: the same whatever the text, unless there are more kinds than colours.
function huesOf(labels, found) {
  const all = [...new Set(labels.map(kindOf))].filter((kind) => kind !== "O");
  const kinds = [...new Set([...(all.length <= HUES ? all : []), ...found.map(labelOf).map(kindOf)])];
  return new Map(kinds.map((kind, index) => [kind, index % HUES]));
}

function marked(text, found, hues, pick) {
  const all = characters(text);
  const parts = [];
  let reached = 0;
  for (const one of [...found].sort((a, b) => a.start - b.start)) {
    if (one.start < reached) continue;
    parts.push(all.slice(reached, one.start).join(""), mark(one, all.slice(one.start, one.end).join(""), hues, pick));
    reached = one.end;
  }
  return element("p", { class: "said marked" }, ...parts, all.slice(reached).join(""));
}

function mark(one, words, hues, pick) {
  const label = labelOf(one);
  const button = element("button", { type: "button", "aria-pressed": "false", title: percent(one.score) },
    element("span", { class: "words" }, words), " ", element("span", { class: "label" }, label));
  button.addEventListener("click", () => pick(one, button));
  return element("mark", { class: `hue-${hues.get(kindOf(label))}`, "data-start": one.start, "data-end": one.end, "data-label": label }, button);
}

function legend(found, hues) {
  const kinds = [...new Set(found.map((one) => kindOf(labelOf(one))))];
  const rows = kinds.map((kind) => element("li", { class: `hue-${hues.get(kind)}` }, kind));
  return element("ul", { class: "legend", "aria-label": "Kinds" }, ...rows);
}
