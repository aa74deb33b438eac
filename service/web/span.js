// The answer to a question, where it stands in a context.

import { bars } from "./bars.js";
import { characters, element, percent } from "./dom.js";
import { amount, area, answerPlace, asking, empty, examples, field, given, line, sides } from "./form.js";
import { QUESTIONS } from "./samples.js";

export function mountSpan(container, page) {
  const question = line(QUESTIONS[0].question);
  const context = area(QUESTIONS[0].context, 7);
  const count = amount(3, 1, 20);
  const place = answerPlace("The answer in its place");
  let target = null;

  const request = () => ({
    path: `/models/${page.model.id}`,
    body: { inputs: { question: question.value, context: context.value }, parameters: given({ top_k: count }) },
  });

  async function ask({ path, body }, signal) {
    const found = [await page.request(path, body, signal)].flat().filter((one) => one.end > one.start);
    target = null;
    if (!found.length) {
      empty(place, "The context has no answer.");
      return;
    }
    show(body.inputs.context, found, found[0]);
  }

  function show(text, found, one) {
    target = { start: one.start, end: one.end };
    const rows = found.map((each) => ({
      name: each.answer, share: each.score, figure: percent(each.score), top: each === one,
      onclick: () => show(text, found, each),
    }));
    place.replaceChildren(marked(text, one), bars(rows, "Answers, likeliest first"));
  }

  const form = asking(page, {
    fields: [field("Question", question), field("Context", context), field("Answers", count),
      examples(QUESTIONS, (each) => {
        [question.value, context.value] = [each.question, each.context];
        form.submitted();
      }, (each) => each.question)],
    button: "Answer", request, ask,
  });
  form.addEventListener("input", () => { target = null; });
  empty(place, "The context appears here, with the answer marked.");
  sides(container, form, place);
  return { asked: () => ({ input: [question.value, context.value], target }), leave: form.leave };
}

function marked(text, one) {
  const all = characters(text);
  return element("p", { class: "said" }, all.slice(0, one.start).join(""),
    element("mark", { class: "found", "data-start": one.start, "data-end": one.end }, all.slice(one.start, one.end).join("")),
    all.slice(one.end).join(""));
}
