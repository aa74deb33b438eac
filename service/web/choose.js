// The form for multiple choice: the texts that may follow another one, with their probabilities.

import { bars } from "./bars.js";
import { percent } from "./dom.js";
import { textArea, answerSection, requestForm, showHint, field, textInput, lines, showSideBySide } from "./form.js";
import { CHOICES } from "./samples.js";

export function mountChoose(container, page) {
  const text = textInput(CHOICES.text);
  const choices = textArea(CHOICES.choices.join("\n"), 7);
  const place = answerSection("Choices, most likely first");
  let best = null;

  const request = () => ({
    path: `/models/${page.model.id}`, body: { inputs: { text: text.value, choices: lines(choices.value) } },
  });

  async function send({ path, body }, signal) {
    const answers = await page.request(path, body, signal);
    best = body.inputs.choices[answers[0].index];
    place.replaceChildren(bars(answers.map(({ index, score }, rank) => ({
      name: body.inputs.choices[index], share: score, figure: percent(score), top: !rank,
    })), "Choices, most likely first"));
  }

  const form = requestForm(page, {
    fields: [field("Text", text), field("Choices, one per line", choices)], button: "Choose", request, send,
  });
  showHint(place, "The choices appear here, most likely first.");
  showSideBySide(container, form, place);
  return { explainSubject: () => ({ input: [text.value, best ?? lines(choices.value)[0] ?? ""] }), abort: form.abort };
}
