// Texts as vectors, compared: a matrix of cosines.

import { element, toned } from "./dom.js";
import { area, answerPlace, asking, empty, field, lines, sides } from "./form.js";
import { SENTENCES } from "./samples.js";

const MOST = 24; // lines that are compared on a screen

export function mountEmbed(container, page) {
  const texts = area(SENTENCES.join("\n"), 8);
  const place = answerPlace("Similarity");

  const request = () => ({ path: "/v1/embeddings", body: { model: page.model.id, input: lines(texts.value).slice(0, MOST) } });

  async function ask({ path, body }, signal) {
    const { data } = await page.request(path, body, signal);
    const units = data.map((each) => unit(each.embedding));
    place.replaceChildren(matrix(body.input, units.map((one) => units.map((other) => dot(one, other)))),
      element("p", { class: "hint" }, `Cosines of vectors of ${data[0].embedding.length} numbers.`));
  }

  const form = asking(page, {
    fields: [field("Texts, one a line", texts, `Up to ${MOST} are compared.`)], button: "Compare", request, ask,
  });
  empty(place, "How alike they are appears here.");
  sides(container, form, place);
  return {
    asked: () => {
      const [first, second] = lines(texts.value);
      return { input: first ?? "", target: second ? { text: second } : null };
    },
    leave: form.leave,
  };
}

function dot(one, other) {
  return one.reduce((sum, value, index) => sum + value * other[index], 0);
}

function unit(vector) {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((value) => value / length);
}

// A table: every row and column has its text, every cell its number.
function matrix(texts, values) {
  const heads = texts.map((text, index) => element("th", { scope: "col", title: text }, String(index + 1)));
  const rows = values.map((row, index) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "ordinal" }, String(index + 1)), texts[index]),
    ...row.map((value) => toned(element("td", {}, value.toFixed(2)), "--heat", Math.max(0, value).toFixed(3)))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarity of all pairs" },
    element("table", { class: "heat" }, element("caption", { class: "hidden" }, "Similarity of all pairs"),
      element("thead", {}, element("tr", {}, element("td"), ...heads)), element("tbody", {}, ...rows)));
}
