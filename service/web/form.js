// Parts of all forms: labelled controls, and a form that sends a request, can stop it and shows its error.
//
// A form has one request at a time; a new one aborts the one before.

import { element, uniqueId } from "./dom.js";

const MAX_NAME_LENGTH = 34; // characters of an example

export function field(label, control, hint = "") {
  control.id ||= uniqueId("field");
  const hintNode = hint ? element("p", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (hintNode) control.setAttribute("aria-describedby", hintNode.id);
  return element("div", { class: "field" }, element("label", { for: control.id }, label), control, hintNode);
}

export function textArea(value = "", rows = 4) {
  const control = element("textarea", { rows, spellcheck: "false" });
  control.value = value;
  return control;
}

export function textInput(value = "") {
  const control = element("input", { type: "text", spellcheck: "false", autocomplete: "off" });
  control.value = value;
  return control;
}

export function numberInput(value, min, max, step = 1) {
  const control = element("input", { type: "number", min, max, step, inputmode: "decimal" });
  control.value = value;
  return control;
}

// The values of number inputs. An empty input is omitted, so the server's default applies.
export function numberValues(controls) {
  const filled = Object.entries(controls).filter(([, each]) => each.value !== "");
  return Object.fromEntries(filled.map(([name, each]) => [name, Number(each.value)]));
}

export function choice(options, value) {
  const control = element("select", {}, ...options.map((each) => element("option", { value: each }, each)));
  control.value = value ?? options[0];
  return control;
}

export function checkbox(label, value) {
  const control = element("input", { type: "checkbox", id: uniqueId("tick") });
  control.checked = value;
  return { control, row: element("div", { class: "tick" }, control, element("label", { for: control.id }, label)) };
}

// Lines that are not empty.
export function lines(text) {
  return text.split("\n").map((each) => each.trim()).filter(Boolean);
}

// Shows the form and its answer side by side.
export function showSideBySide(container, form, answer) {
  container.replaceChildren(element("div", { class: "sides" }, form, answer));
}

// The section for an answer; screen readers announce its content.
export function answerSection(label = "Answer") {
  return element("section", { class: "answer", "aria-label": label, "aria-live": "polite" });
}

export function showHint(place, sentence) {
  place.replaceChildren(element("p", { class: "hint" }, sentence));
}

// Buttons for examples; `onPick` is called with the example, `nameOf` returns its label.
export function exampleButtons(choices, onPick, nameOf = (each) => each) {
  const buttons = choices.map((each) =>
    element("button", { type: "button", class: "quiet", onclick: () => onPick(each) }, shorten(nameOf(each))));
  return element("div", { class: "row", role: "group", "aria-label": "Examples" }, ...buttons);
}

function shorten(text) {
  return text.length > MAX_NAME_LENGTH ? `${text.slice(0, text.lastIndexOf(" ", MAX_NAME_LENGTH - 2))} …` : text;
}

// A form of `fields`. `request()` returns its request, {path, body}; `send(request, signal)` sends it and draws.
export function requestForm(page, { fields, button = "Run", request, send, label = "Request" }) {
  const error = element("p", { class: "error", role: "alert" });
  const runButton = element("button", { type: "submit" }, button);
  const stopButton = element("button", { type: "button", class: "quiet", hidden: true }, "Stop");
  const form = element("form", { class: "ask", "aria-label": label }, ...fields, element("div", { class: "row" }, runButton, stopButton), error);
  let running = null;

  const preview = () => page.showRequest(...requestArguments(request()));
  const showBusy = (isBusy) => {
    form.setAttribute("aria-busy", String(isBusy));
    stopButton.hidden = !isBusy;
  };

  async function submit() {
    running?.abort();
    const controller = (running = new AbortController());
    const planned = request();
    error.textContent = "";
    page.showRequest(...requestArguments(planned));
    showBusy(true);
    try {
      await send(planned, controller.signal);
    } catch (problem) {
      if (problem.name !== "AbortError") error.textContent = problem.message;
    } finally {
      if (running === controller) {
        running = null;
        showBusy(false);
        page.onChange();
      }
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  form.addEventListener("input", preview);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  stopButton.addEventListener("click", () => running?.abort());
  form.abort = () => running?.abort();
  form.run = submit;
  queueMicrotask(preview);
  return form;
}

function requestArguments({ path, body }) {
  return [path, body];
}
