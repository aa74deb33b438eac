// The form for an encoder-decoder: the generated text and its alignment with the source.

import { drawAlignment } from "./attention.js";
import { element } from "./dom.js";
import { numberInput, textArea, answerSection, requestForm, showHint, exampleButtons, field, numberValues, showSideBySide, checkbox } from "./form.js";
import { TRANSLATED } from "./samples.js";

export function mountTranslate(container, page) {
  const text = textArea(TRANSLATED[0], 4);
  const beams = numberInput(4, 1, 16);
  const maxTokens = numberInput("", 1, page.model.max_tokens);
  const canExplain = (page.model.explain ?? ["attention"]).includes("attention");
  const alignment = checkbox("Show alignment", canExplain);
  alignment.row.hidden = !canExplain; // the server's setting explain is false
  const place = answerSection("Generated text");
  const matrix = element("div", { class: "alignment", "aria-live": "off" });
  let input = "";
  let output = "";

  const request = () => ({
    path: `/models/${page.model.id}/pipeline/translation`,
    body: { inputs: text.value, parameters: numberValues({ num_beams: beams, max_new_tokens: maxTokens }) },
  });

  async function send({ path, body }, signal) {
    const [result] = await page.request(path, body, signal);
    [input, output] = [body.inputs, result.translation_text];
    matrix.replaceChildren();
    place.replaceChildren(element("p", { class: "said headline" }, output || "The model generated no text."), matrix);
    if (!output || !alignment.control.checked) return;
    const explainBody = { model: page.model.id, input, method: "attention", target: { text: output } };
    drawAlignment(matrix, await page.request("/v1/explain", explainBody, signal));
  }

  const form = requestForm(page, {
    fields: [field("Text", text), element("div", { class: "settings" }, field("Beams", beams), field("Max tokens", maxTokens), alignment.row),
      exampleButtons(TRANSLATED, (each) => { text.value = each; form.run(); })],
    button: "Generate", request, send,
  });
  showHint(place, "The generated text appears here.");
  showSideBySide(container, form, place);
  return {
    explainSubject: () => output ? { input, output, target: { text: output } } : { input: text.value, output: "" },
    abort: form.abort,
  };
}
