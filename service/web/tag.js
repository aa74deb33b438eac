// The form for a token classifier: the entities of a text, marked in it.
//
// The offsets of the answer count characters of the text that was sent.

import { characters, element, percent } from "./dom.js";
import { textArea, answerSection, requestForm, choice, showHint, exampleButtons, field, showSideBySide } from "./form.js";
import { TAGGED } from "./samples.js";

const HUES = 8;
const GROUPING = { "whole words": "first", "runs of tokens": "simple", "single tokens": "none" };

export function mountTag(container, page) {
  const text = textArea(TAGGED[0], 5);
  const grouping = choice(Object.keys(GROUPING));
  const place = answerSection("The text with its entities");
  let target = null;
  let input = "";

  const request = () => ({
    path: `/models/${page.model.id}`,
    body: { inputs: text.value, parameters: { aggregation_strategy: GROUPING[grouping.value] } },
  });

  async function send({ path, body }, signal) {
    const entities = await page.request(path, body, signal);
    [input, target] = [body.inputs, null];
    const hues = kindHues(page.model.labels ?? [], entities);
    const selectedLine = element("p", { class: "hint" }, entities.length ? "Select one and open Attention to see its explanation." : "There are no entities.");
    place.replaceChildren(markedText(body.inputs, entities, hues, select), kindLegend(entities, hues), selectedLine);

    function select(entity, button) {
      for (const each of place.querySelectorAll("mark button")) each.setAttribute("aria-pressed", String(each === button));
      const label = tagLabel(entity);
      target = { start: entity.start, end: entity.end, ...(entity.entity ? { label } : {}) };
      selectedLine.textContent = `${entity.word}: ${label}, ${percent(entity.score)}`;
    }
  }

  const form = requestForm(page, {
    fields: [field("Text", text), field("Grouping", grouping), exampleButtons(TAGGED, (each) => { text.value = each; form.run(); })],
    button: "Find", request, send,
  });
  showHint(place, "The text appears here, with its entities marked.");
  showSideBySide(container, form, place);
  return { explainSubject: () => ({ input: target ? input : text.value, target }), abort: form.abort };
}

function tagLabel(entity) {
  return entity.entity_group ?? entity.entity;
}

// The kind of a label, without the prefix for the first token (B-) or a further one (I-).
function labelKind(label) {
  return label.replace(/^[BIES]-/, "");
}

// The hue of each kind. It is the same for every text, unless there are more kinds than hues.
function kindHues(labels, entities) {
  const all = [...new Set(labels.map(labelKind))].filter((kind) => kind !== "O");
  const kinds = [...new Set([...(all.length <= HUES ? all : []), ...entities.map(tagLabel).map(labelKind)])];
  return new Map(kinds.map((kind, index) => [kind, index % HUES]));
}

function markedText(text, entities, hues, onPick) {
  const letters = characters(text);
  const parts = [];
  let position = 0;
  for (const entity of [...entities].sort((a, b) => a.start - b.start)) {
    if (entity.start < position) continue;
    parts.push(letters.slice(position, entity.start).join(""), tagMark(entity, letters.slice(entity.start, entity.end).join(""), hues, onPick));
    position = entity.end;
  }
  return element("p", { class: "said marked" }, ...parts, letters.slice(position).join(""));
}

function tagMark(entity, words, hues, onPick) {
  const label = tagLabel(entity);
  const button = element("button", { type: "button", "aria-pressed": "false", title: percent(entity.score) },
    element("span", { class: "words" }, words), " ", element("span", { class: "label" }, label));
  button.addEventListener("click", () => onPick(entity, button));
  return element("mark", { class: `hue-${hues.get(labelKind(label))}`, "data-start": entity.start, "data-end": entity.end, "data-label": label }, button);
}

function kindLegend(entities, hues) {
  const kinds = [...new Set(entities.map((one) => labelKind(tagLabel(one))))];
  const rows = kinds.map((kind) => element("li", { class: `hue-${hues.get(kind)}` }, kind));
  return element("ul", { class: "legend", "aria-label": "Kinds" }, ...rows);
}
