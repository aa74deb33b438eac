// The fields of one question about a text: its kind, its instructions, and the options or levels of its answer.

import { element, uniqueId } from "./dom.js";
import { checkbox, field, lines, numberInput, textArea, textInput } from "./form.js";

const KINDS = { noul: "Yes or no", choice: "Choice", score: "Score" };
const MAX_ORDERS = 24;
const OPTION = /^(.*?):\s+(.*)$/; // a name, and after a colon its description

export class QuestionForm {
  // `sample` is {name, type, instructions, options, criteria}; `onRemove` is called by the button Remove.
  constructor(sample, onRemove) {
    this.name = textInput(sample.name);
    this.kind = element("select", {}, ...Object.entries(KINDS).map(([value, text]) => element("option", { value }, text)));
    this.kind.value = sample.type;
    this.instructions = textInput(sample.instructions);
    this.options = textArea((sample.options ?? []).join("\n"), 3);
    this.criteria = { true: textInput(sample.criteria?.true), false: textInput(sample.criteria?.false) };
    this.orders = numberInput(1, 1, MAX_ORDERS);
    this.explain = checkbox("Explain the answer by the text", false);
    this.readsCriteria = true;
    this.legend = element("legend");
    this.remove = element("button", { type: "button", class: "quiet small", onclick: onRemove }, "Remove");
    this.optionsField = element("div");
    this.criteriaFields = element("div", { class: "criteria" }, field("Yes means", this.criteria.true), field("No means", this.criteria.false));
    this.ordersField = field("Orders", this.orders);
    this.kind.addEventListener("change", () => this.showFields());
    const row = element("div", { class: "settings" }, field("Kind", this.kind), field("Name", this.name), this.ordersField, this.remove);
    this.node = element("fieldset", { class: "question" }, this.legend, row, field("Instructions", this.instructions),
      this.optionsField, this.criteriaFields, this.explain.row);
    this.showFields();
  }

  // The number of the question in the form, which labels it for screen readers.
  setNumber(number) {
    this.legend.textContent = `Question ${number}`;
    this.remove.setAttribute("aria-label", `Remove question ${number}`);
  }

  // Shows what the model can do: whether its answers are explained, and whether it reads what counts as yes and no.
  setAbilities({ isExplained, readsCriteria }) {
    this.explain.row.hidden = !isExplained;
    this.readsCriteria = readsCriteria;
    this.showFields();
  }

  // A question of yes or no has neither options nor an order of them, but may say what counts as each.
  showFields() {
    const isYesNo = this.kind.value === "noul";
    this.ordersField.hidden = this.optionsField.hidden = isYesNo;
    this.criteriaFields.hidden = !isYesNo || !this.readsCriteria;
    if (isYesNo) return;
    const [label, hint] = this.kind.value === "choice"
      ? ["Options, one per line", "A description may follow after a colon: billing: payments and refunds"]
      : ["Levels, one per line", "The lowest first."];
    this.options.id ||= uniqueId("options");
    this.optionsField.replaceChildren(field(label, this.options, hint));
  }

  // [name, description] of each option; the description is null if there is none.
  choices() {
    return lines(this.options.value).map((line) => line.match(OPTION)?.slice(1) ?? [line, null]);
  }

  // The question as the API reads it.
  question() {
    const question = { type: this.kind.value, instructions: this.instructions.value };
    const criteria = this.writtenCriteria();
    if (criteria) question.criteria = criteria;
    if (question.type !== "noul" && Number(this.orders.value) > 1) question.permutations = Number(this.orders.value);
    if (this.explain.control.checked && !this.explain.row.hidden) question.explain = {};
    return question;
  }

  // Descriptions of options or levels; of yes and no those that are written, null if there are none.
  writtenCriteria() {
    switch (this.kind.value) {
      case "choice": return Object.fromEntries(this.choices());
      case "score": return lines(this.options.value);
      default: {
        if (!this.readsCriteria) return null;
        const written = Object.entries(this.criteria).map(([name, { value }]) => [name, value.trim()]).filter(([, text]) => text);
        return written.length ? Object.fromEntries(written) : null;
      }
    }
  }

  // Throws an error for what the request could not say: an object keeps only one of two equal names.
  check() {
    const names = this.choices().map(([name]) => name);
    const repeated = this.kind.value === "choice" && names.find((name, index) => names.indexOf(name) < index);
    if (repeated) throw new Error(`${this.legend.textContent}: the option ${repeated} occurs twice.`);
  }
}
