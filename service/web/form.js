// What all forms are made of: labelled controls, and asking with a way to stop and a place for what goes wrong.
//
// Knows no task.  The one idea: a form asks one thing at a time; asking again gives up what was asked before.

import { element, unique } from "./dom.js";

const LONGEST_NAME = 34; // of an example

export function field(label, control, hint = "") {
  control.id ||= unique("field");
  const said = hint ? element("p", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (said) control.setAttribute("aria-describedby", said.id);
  return element("div", { class: "field" }, element("label", { for: control.id }, label), control, said);
}

export function area(value = "", rows = 4) {
  const control = element("textarea", { rows, spellcheck: "false" });
  control.value = value;
  return control;
}

export function line(value = "") {
  const control = element("input", { type: "text", spellcheck: "false", autocomplete: "off" });
  control.value = value;
  return control;
}

export function amount(value, least, most, step = 1) {
  const control = element("input", { type: "number", min: least, max: most, step, inputmode: "decimal" });
  control.value = value;
  return control;
}

// What a form says of its numbers; one that is left empty is left to the server.
export function given(controls) {
  const said = Object.entries(controls).filter(([, each]) => each.value !== "");
  return Object.fromEntries(said.map(([name, each]) => [name, Number(each.value)]));
}

export function choice(options, value) {
  const control = element("select", {}, ...options.map((each) => element("option", { value: each }, each)));
  control.value = value ?? options[0];
  return control;
}

export function ticked(label, value) {
  const control = element("input", { type: "checkbox", id: unique("tick") });
  control.checked = value;
  return { control, row: element("div", { class: "tick" }, control, element("label", { for: control.id }, label)) };
}

// Lines that are not empty.
export function lines(text) {
  return text.split("\n").map((each) => each.trim()).filter(Boolean);
}

// Beside each other: what is asked, and its answer.
export function sides(container, form, answer) {
  container.replaceChildren(element("div", { class: "sides" }, form, answer));
}

// Where an answer appears; what is there is told to whoever cannot see it.
export function answerPlace(label = "Answer") {
  return element("section", { class: "answer", "aria-label": label, "aria-live": "polite" });
}

export function empty(place, sentence) {
  place.replaceChildren(element("p", { class: "hint" }, sentence));
}

// Buttons that put something into the controls; `named` is what a choice is called.
export function examples(choices, put, named = (each) => each) {
  const buttons = choices.map((each) =>
    element("button", { type: "button", class: "quiet", onclick: () => put(each) }, short(named(each))));
  return element("div", { class: "row", role: "group", "aria-label": "Examples" }, ...buttons);
}

function short(text) {
  return text.length > LONGEST_NAME ? `${text.slice(0, text.lastIndexOf(" ", LONGEST_NAME - 2))} …` : text;
}

// A form of `fields`; `request()` says what it would ask now, {path, body}; `ask(asked, signal)` asks it and draws.
export function asking(page, { fields, button = "Run", request, ask, label = "What to ask" }) {
  const error = element("p", { class: "error", role: "alert" });
  const run = element("button", { type: "submit" }, button);
  const stop = element("button", { type: "button", class: "quiet", hidden: true }, "Stop");
  const form = element("form", { class: "ask", "aria-label": label }, ...fields, element("div", { class: "row" }, run, stop), error);
  let running = null;

  const preview = () => page.copyable(...spread(request()));
  const busy = (now) => {
    form.setAttribute("aria-busy", String(now));
    stop.hidden = !now;
  };

  async function submit() {
    running?.abort();
    const mine = (running = new AbortController());
    const asked = request();
    error.textContent = "";
    page.copyable(...spread(asked));
    busy(true);
    try {
      await ask(asked, mine.signal);
    } catch (problem) {
      if (problem.name !== "AbortError") error.textContent = problem.message;
    } finally {
      if (running === mine) {
        running = null;
        busy(false);
        page.changed();
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
  stop.addEventListener("click", () => running?.abort());
  form.leave = () => running?.abort();
  form.submitted = submit;
  queueMicrotask(preview);
  return form;
}

function spread({ path, body }) {
  return [path, body];
}
