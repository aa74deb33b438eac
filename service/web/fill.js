// The form for a masked language model: candidates for each mask; a click inserts one.

import { bars } from "./bars.js";
import { element, percent } from "./dom.js";
import { numberInput, textArea, answerSection, requestForm, showHint, exampleButtons, field, numberValues as numbers, showSideBySide } from "./form.js";
import { MASKED } from "./samples.js";

export function mountFill(container, page) {
  const mask = page.model.mask || "[MASK]";
  const samples = MASKED.map((each) => each.replace("{}", mask));
  const text = textArea(samples[0], 4);
  const count = numberInput(8, 1, 100);
  const place = answerSection("Words for the masks");

  const request = () => ({
    path: `/models/${page.model.id}`, body: { inputs: text.value, parameters: numbers({ top_k: count }) },
  });

  async function send({ path, body }, signal) {
    const results = await page.request(path, body, signal);
    const masks = Array.isArray(results[0]) ? results : [results];
    place.replaceChildren(...masks.map((candidates, index) => candidateBars(body.inputs, candidates, index, masks.length)));
  }

  function candidateBars(inputs, candidates, index, maskCount) {
    const maximum = candidates[0]?.score || 1;
    const rows = candidates.map(({ token_str: word, score }, rank) => ({
      name: word, share: score / maximum, figure: percent(score), top: !rank,
      onclick: () => insertWord(inputs, index, word),
    }));
    const title = maskCount > 1 ? element("h3", {}, `Mask ${index + 1}`) : null;
    return element("div", {}, title, bars(rows, `Words for mask ${index + 1}; a click inserts one`));
  }

  // Replaces the mask by the word. A piece that continues a word (##) is joined to it.
  function insertWord(inputs, index, word) {
    const parts = inputs.split(mask);
    const before = parts.slice(0, index + 1).join(mask);
    text.value = word.startsWith("##") ? before.trimEnd() + word.slice(2) : before + word.trim();
    text.value += parts.slice(index + 1).join(mask);
    text.dispatchEvent(new Event("input", { bubbles: true }));
    text.focus();
  }

  function insertMask() {
    text.setRangeText(mask, text.selectionStart, text.selectionEnd, "end");
    text.dispatchEvent(new Event("input", { bubbles: true }));
    text.focus();
  }

  const form = requestForm(page, {
    fields: [field("Text", text, `${mask} marks a missing word.`),
      element("div", { class: "row" }, element("button", { type: "button", class: "quiet", onclick: insertMask }, `Insert ${mask} at the cursor`)),
      field("Words", count), exampleButtons(samples, (each) => { text.value = each; form.run(); })],
    button: "Fill in", request, send,
  });
  showHint(place, "Words appear here, most likely first.");
  showSideBySide(container, form, place);
  return { explainSubject: () => ({ input: text.value }), abort: form.abort };
}
