// Labels of a text, or of two that belong together; or of labels that are named on the spot.

import { bars } from "./bars.js";
import { element, percent } from "./dom.js";
import { area, answerPlace, asking, empty, examples, field, line, lines, sides, ticked } from "./form.js";
import { pairSamples, textSamples, ZERO_SHOT } from "./samples.js";

export function mountClassify(container, page) {
  const { model } = page;
  const pairs = model.pairs ?? "possible";
  const given = pairs === "needed" ? pairSamples() : textSamples(model).map((text) => [text, ""]);
  const text = area(given[0][0], 4);
  const second = area(given[0][1], pairs === "needed" ? 3 : 2);
  const zero = (model.tasks ?? []).includes("zero-shot-classification") ? new ZeroShot() : null;
  const place = answerPlace();

  const input = () => second.value && !zero?.on() ? [text.value, second.value] : text.value;

  function request() {
    const [one, other] = [text.value, zero?.on() ? "" : second.value];
    const inputs = other ? { text: one, text_pair: other } : one;
    return { path: `/models/${model.id}`, body: zero?.on() ? { inputs, parameters: zero.parameters() } : { inputs } };
  }

  async function ask({ path, body }, signal) {
    const found = (await page.request(path, body, signal)).flat();
    const rows = found.map(({ label, score }, index) => ({ name: label, share: score, figure: percent(score), top: !index }));
    place.replaceChildren(
      element("p", { class: "headline" }, found[0]?.label ?? "No label"),
      bars(rows, "Labels, likeliest first"),
    );
  }

  const put = ([one, other]) => {
    [text.value, second.value] = [one, other];
    form.submitted();
  };
  const form = asking(page, {
    fields: [
      field(pairs === "needed" ? "First text" : "Text", text),
      ...(pairs === "none" ? [] : [field(pairs === "needed" ? "Second text" : "Second text, where two belong together", second)]),
      ...(zero ? [zero.node] : []),
      examples(given, put, ([one]) => one),
    ],
    button: "Classify", request, ask,
  });
  empty(place, "Labels and their probabilities appear here.");
  sides(container, form, place);
  return { asked: () => ({ input: input() }), leave: form.leave };
}

// A model of entailment takes any labels.
class ZeroShot {
  constructor() {
    this.labels = area(ZERO_SHOT.labels.join("\n"), 3);
    this.template = line(ZERO_SHOT.template);
    this.several = ticked("Several may hold", false);
    this.use = ticked("Labels of my own", false);
    this.inside = element("div", { hidden: true },
      field("Labels, one a line", this.labels), field("Hypothesis", this.template, "{} is where the label goes."), this.several.row);
    this.use.control.addEventListener("change", () => { this.inside.hidden = !this.on(); });
    this.node = element("div", {}, this.use.row, this.inside);
  }

  on() {
    return this.use.control.checked;
  }

  parameters() {
    return {
      candidate_labels: lines(this.labels.value), hypothesis_template: this.template.value,
      multi_label: this.several.control.checked,
    };
  }
}
