// Words for what is hidden in a text; a click puts one in.

import { bars } from "./bars.js";
import { element, percent } from "./dom.js";
import { amount, area, answerPlace, asking, empty, examples, field, given as numbers, sides } from "./form.js";
import { MASKED } from "./samples.js";

export function mountFill(container, page) {
  const mask = page.model.mask || "[MASK]";
  const given = MASKED.map((each) => each.replace("{}", mask));
  const text = area(given[0], 4);
  const count = amount(8, 1, 100);
  const place = answerPlace("Words for what is hidden");

  const request = () => ({
    path: `/models/${page.model.id}`, body: { inputs: text.value, parameters: numbers({ top_k: count }) },
  });

  async function ask({ path, body }, signal) {
    const found = await page.request(path, body, signal);
    const masks = Array.isArray(found[0]) ? found : [found];
    place.replaceChildren(...masks.map((words, index) => guesses(body.inputs, words, index, masks.length)));
  }

  function guesses(asked, words, index, several) {
    const most = words[0]?.score || 1;
    const rows = words.map(({ token_str: word, score }, rank) => ({
      name: word, share: score / most, figure: percent(score), top: !rank,
      onclick: () => put(asked, index, word),
    }));
    const title = several > 1 ? element("h3", {}, `Hidden word ${index + 1}`) : null;
    return element("div", {}, title, bars(rows, `Words for hidden word ${index + 1}; one that is chosen is put in`));
  }

  // In the place of that mask; pieces that go on with a word are written to it.
  function put(asked, index, word) {
    const parts = asked.split(mask);
    const before = parts.slice(0, index + 1).join(mask);
    text.value = word.startsWith("##") ? before.trimEnd() + word.slice(2) : before + word.trim();
    text.value += parts.slice(index + 1).join(mask);
    text.dispatchEvent(new Event("input", { bubbles: true }));
    text.focus();
  }

  function hide() {
    text.setRangeText(mask, text.selectionStart, text.selectionEnd, "end");
    text.dispatchEvent(new Event("input", { bubbles: true }));
    text.focus();
  }

  const form = asking(page, {
    fields: [field("Text", text, `${mask} stands for the word that is looked for.`),
      element("div", { class: "row" }, element("button", { type: "button", class: "quiet", onclick: hide }, `Put ${mask} at the cursor`)),
      field("Words", count), examples(given, (each) => { text.value = each; form.submitted(); })],
    button: "Fill in", request, ask,
  });
  empty(place, "Words appear here, likeliest first.");
  sides(container, form, place);
  return { asked: () => ({ input: text.value }), leave: form.leave };
}
