// A text read and another written: translations and the like, with where the writer looked.

import { drawAlignment } from "./attention.js";
import { element } from "./dom.js";
import { amount, area, answerPlace, asking, empty, examples, field, given, sides, ticked } from "./form.js";
import { TRANSLATED } from "./samples.js";

export function mountTranslate(container, page) {
  const text = area(TRANSLATED[0], 4);
  const beams = amount(4, 1, 16);
  const most = amount("", 1, page.model.max_tokens);
  const explained = (page.model.explain ?? ["attention"]).includes("attention");
  const aligned = ticked("Where it looked", explained);
  aligned.row.hidden = !explained; // a server whose setting explain is off
  const place = answerPlace("What it wrote");
  const matrix = element("div", { class: "alignment", "aria-live": "off" });
  let input = "";
  let output = "";

  const request = () => ({
    path: `/models/${page.model.id}/pipeline/translation`,
    body: { inputs: text.value, parameters: given({ num_beams: beams, max_new_tokens: most }) },
  });

  async function ask({ path, body }, signal) {
    const [written] = await page.request(path, body, signal);
    [input, output] = [body.inputs, written.translation_text];
    matrix.replaceChildren();
    place.replaceChildren(element("p", { class: "said headline" }, output || "Nothing was written."), matrix);
    if (!output || !aligned.control.checked) return;
    const asked = { model: page.model.id, input, method: "attention", target: { text: output } };
    drawAlignment(matrix, await page.request("/v1/explain", asked, signal));
  }

  const form = asking(page, {
    fields: [field("Text", text), element("div", { class: "settings" }, field("Beams", beams), field("Most tokens", most), aligned.row),
      examples(TRANSLATED, (each) => { text.value = each; form.submitted(); })],
    button: "Write", request, ask,
  });
  empty(place, "What the model writes appears here.");
  sides(container, form, place);
  return {
    asked: () => output ? { input, output, target: { text: output } } : { input: text.value, output: "" },
    leave: form.leave,
  };
}
