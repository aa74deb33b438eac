// The form for an embedder: the cosine similarities of texts.

import { element, withProperty } from "./dom.js";
import { textArea, answerSection, requestForm, showHint, field, lines, showSideBySide } from "./form.js";
import { SENTENCES } from "./samples.js";

const MAX_TEXTS = 24; // lines that are compared

export function mountEmbed(container, page) {
  const texts = textArea(SENTENCES.join("\n"), 8);
  const place = answerSection("Similarity");

  const request = () => ({ path: "/v1/embeddings", body: { model: page.model.id, input: lines(texts.value).slice(0, MAX_TEXTS) } });

  async function send({ path, body }, signal) {
    const { data } = await page.request(path, body, signal);
    const units = data.map((each) => unit(each.embedding));
    place.replaceChildren(similarityTable(body.input, units.map((one) => units.map((other) => dot(one, other)))),
      element("p", { class: "hint" }, `Cosines of vectors with ${data[0].embedding.length} numbers.`));
  }

  const form = requestForm(page, {
    fields: [field("Texts, one per line", texts, `At most ${MAX_TEXTS} texts are compared.`)], button: "Compare", request, send,
  });
  showHint(place, "The similarities appear here.");
  showSideBySide(container, form, place);
  return {
    explainSubject: () => {
      const [first, second] = lines(texts.value);
      return { input: first ?? "", target: second ? { text: second } : null };
    },
    abort: form.abort,
  };
}

function dot(one, other) {
  return one.reduce((sum, value, index) => sum + value * other[index], 0);
}

function unit(vector) {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((value) => value / length);
}

// A table of the cosines; the rows and columns are the texts.
function similarityTable(texts, values) {
  const heads = texts.map((text, index) => element("th", { scope: "col", title: text }, String(index + 1)));
  const rows = values.map((row, index) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "ordinal" }, String(index + 1)), texts[index]),
    ...row.map((value) => withProperty(element("td", {}, value.toFixed(2)), "--heat", Math.max(0, value).toFixed(3)))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarity of all pairs" },
    element("table", { class: "heat" }, element("caption", { class: "hidden" }, "Similarity of all pairs"),
      element("thead", {}, element("tr", {}, element("td"), ...heads)), element("tbody", {}, ...rows)));
}
