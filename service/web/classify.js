// The form for a classifier: the labels of a text or of a pair of texts, or zero-shot labels that the user gives.

import { bars } from "./bars.js";
import { element, percent } from "./dom.js";
import { textArea, answerSection, requestForm, showHint, exampleButtons, field, textInput, lines, showSideBySide, checkbox } from "./form.js";
import { pairSamples, textSamples, ZERO_SHOT } from "./samples.js";

export function mountClassify(container, page) {
  const { model } = page;
  const pairs = model.pairs ?? "possible";
  const samples = pairs === "needed" ? pairSamples() : textSamples(model).map((text) => [text, ""]);
  const text = textArea(samples[0][0], 4);
  const second = textArea(samples[0][1], pairs === "needed" ? 3 : 2);
  const zeroShot = (model.tasks ?? []).includes("zero-shot-classification") ? new ZeroShot() : null;
  const place = answerSection();

  const input = () => second.value && !zeroShot?.isOn() ? [text.value, second.value] : text.value;

  function request() {
    const [one, other] = [text.value, zeroShot?.isOn() ? "" : second.value];
    const inputs = other ? { text: one, text_pair: other } : one;
    return { path: `/models/${model.id}`, body: zeroShot?.isOn() ? { inputs, parameters: zeroShot.parameters() } : { inputs } };
  }

  async function send({ path, body }, signal) {
    const labels = (await page.request(path, body, signal)).flat();
    const rows = labels.map(({ label, score }, index) => ({ name: label, share: score, figure: percent(score), top: !index }));
    place.replaceChildren(
      element("p", { class: "headline" }, labels[0]?.label ?? "No label"),
      bars(rows, "Labels, most likely first"),
    );
  }

  const fillForm = ([one, other]) => {
    [text.value, second.value] = [one, other];
    form.run();
  };
  const form = requestForm(page, {
    fields: [
      field(pairs === "needed" ? "First text" : "Text", text),
      ...(pairs === "none" ? [] : [field(pairs === "needed" ? "Second text" : "Second text, for a pair", second)]),
      ...(zeroShot ? [zeroShot.node] : []),
      exampleButtons(samples, fillForm, ([one]) => one),
    ],
    button: "Classify", request, send,
  });
  showHint(place, "Labels and their probabilities appear here.");
  showSideBySide(container, form, place);
  return { explainSubject: () => ({ input: input() }), abort: form.abort };
}

// A model of entailment classifies by any labels.
class ZeroShot {
  constructor() {
    this.labels = textArea(ZERO_SHOT.labels.join("\n"), 3);
    this.template = textInput(ZERO_SHOT.template);
    this.multiLabel = checkbox("Multi-label", false);
    this.enabled = checkbox("Zero-shot: candidate labels", false);
    this.fields = element("div", { hidden: true },
      field("Candidate labels, one per line", this.labels), field("Hypothesis template", this.template, "{} is replaced by the label."), this.multiLabel.row);
    this.enabled.control.addEventListener("change", () => { this.fields.hidden = !this.isOn(); });
    this.node = element("div", {}, this.enabled.row, this.fields);
  }

  isOn() {
    return this.enabled.control.checked;
  }

  parameters() {
    return {
      candidate_labels: lines(this.labels.value), hypothesis_template: this.template.value,
      multi_label: this.multiLabel.control.checked,
    };
  }
}
