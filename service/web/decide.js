// The tab Decide: typed questions about a text, answered with a probability for every option.

import { drawAnswer } from "./decision.js";
import { element } from "./dom.js";
import { answerSection, exampleButtons, field, requestForm, showHint, showSideBySide, textArea } from "./form.js";
import { QuestionForm } from "./questionform.js";
import { Calibrations, drawReliability } from "./reliability.js";
import { STATES, labelQuestions, typedQuestions } from "./samples.js";

const PATH = "/v1/systemone";
const TASK = "decisions"; // of models that answer questions
const OWN_LABELS = "This classifier answers with its own labels only: options are labels of it, and of a question of yes or no the instructions are one.";

export function canDecide(model) {
  return (model.tasks ?? []).includes(TASK);
}

// Whether a model answers with labels that it was trained on, whatever the options say.
function hasOwnLabels(model) {
  return model.task === "classify" && !model.tasks.includes("zero-shot-classification");
}

// `selectModel` of what it returns fills the panel for a model; questions that the user has changed are kept.
export function mountDecide(container, page) {
  const state = textArea(STATES[0], 4);
  const list = element("div", { class: "questions", oninput: () => { isChanged = true; } });
  const add = element("button", { type: "button", class: "quiet", onclick: addQuestion }, "Add a question");
  const note = element("p", { class: "hint" });
  const place = answerSection("Answers");
  const calibrations = new Calibrations(page.request);
  let model = null;
  let form = null;
  let questions = [];
  let isChanged = false; // whether the user has changed the questions

  function setQuestions(samples) {
    questions = samples.map(questionForm);
    drawQuestions();
  }

  function questionForm(sample) {
    const made = new QuestionForm(sample, () => removeQuestion(made));
    made.setAbilities(abilities());
    return made;
  }

  function abilities() {
    const readsCriteria = !hasOwnLabels(model) && model.task !== "label_texts";
    return { isExplained: (model.explain_decisions ?? []).length > 0, readsCriteria };
  }

  function drawQuestions() {
    questions.forEach((each, index) => each.setNumber(index + 1));
    list.replaceChildren(...questions.map((each) => each.node));
  }

  function addQuestion() {
    const taken = new Set(questions.map((each) => each.name.value));
    let number = questions.length + 1;
    while (taken.has(`question_${number}`)) number += 1;
    const made = questionForm({ name: `question_${number}`, type: "noul", instructions: "" });
    questions.push(made);
    drawQuestions();
    made.instructions.focus();
    changed();
  }

  function removeQuestion(removed) {
    questions = questions.filter((each) => each !== removed);
    drawQuestions();
    add.focus();
    changed();
  }

  function changed() {
    isChanged = true;
    form.dispatchEvent(new Event("input", { bubbles: true }));
  }

  function request() {
    const named = questions.map((each) => [each.name.value, each.question()]);
    return { path: PATH, body: { model: model.id, state: state.value, questions: Object.fromEntries(named) } };
  }

  function checkForm() {
    const names = questions.map((each) => each.name.value);
    const repeated = names.find((name, index) => names.indexOf(name) < index);
    if (repeated !== undefined) throw new Error(`Two questions have the name ${repeated}.`);
    questions.forEach((each) => each.check());
  }

  async function send({ path, body }, signal) {
    checkForm();
    const { answers, diagnostics } = await page.request(path, body, signal);
    const drawn = Object.entries(answers).map(([name, answer]) => {
      return drawAnswer(name, { question: body.questions[name], state: body.state }, answer, diagnostics[name]);
    });
    place.replaceChildren(...drawn);
    place.firstElementChild.scrollIntoView({ block: "nearest" }); // beside a long form it may be far above the button
    for (const [index, answer] of Object.values(answers).entries()) await addReliability(body.model, answer, drawn[index]);
  }

  // Draws how reliable the calibration is, if one was applied. Without it the answer is complete.
  async function addReliability(name, answer, node) {
    if (!answer.calibration) return;
    try {
      const map = await calibrations.find(name, answer);
      if (map) node.append(drawReliability(map, answer.confidence));
    } catch (problem) {
      node.append(element("p", { class: "hint" }, `The reliability of the calibration is not known: ${problem.message}`));
    }
  }

  function makeForm() {
    form = requestForm(page, {
      fields: [field("State", state, "The text that the questions are about."), note, list, element("div", { class: "row" }, add),
        exampleButtons(STATES, (text) => { state.value = text; form.run(); })],
      button: "Decide", request, send, label: "Questions",
    });
  }

  function selectModel(selected) {
    if (selected === model) return;
    model = selected;
    form?.abort();
    if (!canDecide(model)) {
      showHint(container, "No served model answers questions.");
      return;
    }
    const isOwn = hasOwnLabels(model);
    note.textContent = isOwn ? `${OWN_LABELS} They are: ${model.labels.join(", ")}.` : "";
    note.hidden = !isOwn;
    questions.forEach((each) => each.setAbilities(abilities()));
    if (!isChanged) setQuestions(isOwn ? labelQuestions(model) : typedQuestions());
    if (!form) makeForm();
    showHint(place, "The probabilities of the options appear here.");
    showSideBySide(container, form, place);
    page.showRequest(...Object.values(request()));
  }

  return { selectModel, abort: () => form?.abort() };
}
