// Common parts of chat and completion: sampling fields and the figures of an answer.

import { numberInput, field, numberValues, checkbox } from "./form.js";
import { element } from "./dom.js";

const ALTERNATIVES = 5;
const DEFAULT_TOKENS = 512;
const UNSUGGESTED = { temperature: 0.7, top_p: 0.95 }; // for a model whose checkpoint suggests no sampling

// The fields of sampling. The default of max tokens is at most half of the context, so that the prompt fits; the others
// begin as the model's checkpoint suggests. `isOn`: whether token probabilities are requested at first.
export function samplingFields(model, isOn = false) {
  const start = Object.keys(model.sampling).length ? model.sampling : UNSUGGESTED;
  const controls = {
    max_tokens: numberInput(Math.min(DEFAULT_TOKENS, Math.ceil(model.max_tokens / 2)), 1, model.max_tokens),
    temperature: fractionInput(start.temperature, 2, 0.1),
    top_p: fractionInput(start.top_p, 1, 0.05),
  };
  const probabilities = checkbox("Token probabilities", isOn);
  const node = element("div", { class: "settings" },
    field("Max tokens", controls.max_tokens), field("Temperature", controls.temperature), field("Top p", controls.top_p),
    probabilities.row);
  return { node, options: () => numberValues(controls), wantsLogprobs: () => probabilities.control.checked, alternatives: ALTERNATIVES };
}

// Without a value the server's default applies. A value between two steps would be invalid.
function fractionInput(value, max, step) {
  const isOnStep = Math.abs(value / step - Math.round(value / step)) < 1e-6;
  return numberInput(value ?? "", 0, max, value === undefined || isOnStep ? step : "any");
}

// The summary of an answer: how it ended, its tokens, tokens per second after the first, time to the first.
export class GenerationTimer {
  constructor() {
    this.start = performance.now();
    this.firstToken = 0;
  }

  recordToken() {
    this.firstToken ||= performance.now();
  }

  summarize(usage, finish) {
    const parts = [];
    if (finish === "length") parts.push("reached max tokens");
    if (finish === "stopped") parts.push("stopped");
    if (usage) parts.push(`${usage.completion_tokens} tokens`);
    const seconds = (performance.now() - this.firstToken) / 1000;
    if (usage?.completion_tokens > 2 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.firstToken) parts.push(`first token after ${Math.round(this.firstToken - this.start)} ms`);
    return parts.join(" · ");
  }
}
