// The form for question answering: the answer, marked in its context.

import { bars } from "./bars.js";
import { characters, element, percent } from "./dom.js";
import { numberInput, textArea, answerSection, requestForm, showHint, exampleButtons, field, numberValues, textInput, showSideBySide } from "./form.js";
import { QUESTIONS } from "./samples.js";

export function mountSpan(container, page) {
  const question = textInput(QUESTIONS[0].question);
  const context = textArea(QUESTIONS[0].context, 7);
  const count = numberInput(3, 1, 20);
  const place = answerSection("Marked answer");
  let target = null;

  const request = () => ({
    path: `/models/${page.model.id}`,
    body: { inputs: { question: question.value, context: context.value }, parameters: numberValues({ top_k: count }) },
  });

  async function send({ path, body }, signal) {
    const answers = [await page.request(path, body, signal)].flat().filter((one) => one.end > one.start);
    target = null;
    if (!answers.length) {
      showHint(place, "The context has no answer.");
      return;
    }
    show(body.inputs.context, answers, answers[0]);
  }

  function show(text, answers, selected) {
    target = { start: selected.start, end: selected.end };
    const rows = answers.map((each) => ({
      name: each.answer, share: each.score, figure: percent(each.score), top: each === selected,
      onclick: () => show(text, answers, each),
    }));
    place.replaceChildren(markedContext(text, selected), bars(rows, "Answers, most likely first"));
  }

  const form = requestForm(page, {
    fields: [field("Question", question), field("Context", context), field("Answers", count),
      exampleButtons(QUESTIONS, (each) => {
        [question.value, context.value] = [each.question, each.context];
        form.run();
      }, (each) => each.question)],
    button: "Answer", request, send,
  });
  form.addEventListener("input", () => { target = null; });
  showHint(place, "The context appears here, with the answer marked.");
  showSideBySide(container, form, place);
  return { explainSubject: () => ({ input: [question.value, context.value], target }), abort: form.abort };
}

function markedContext(text, answer) {
  const letters = characters(text);
  return element("p", { class: "said" }, letters.slice(0, answer.start).join(""),
    element("mark", { class: "found", "data-start": answer.start, "data-end": answer.end }, letters.slice(answer.start, answer.end).join("")),
    letters.slice(answer.end).join(""));
}
