// What chat and completion have in common: how an answer is drawn from a generator.

import { amount, field, given, ticked } from "./form.js";
import { element } from "./dom.js";

const ALTERNATIVES = 5;
const TOKENS = 128;

// The controls; half of what the model takes at once is left for what is said before.
export function drawing(model) {
  const controls = {
    max_tokens: amount(Math.min(TOKENS, Math.ceil(model.max_tokens / 2)), 1, model.max_tokens),
    temperature: amount(0.7, 0, 2, 0.1),
    top_p: amount(0.95, 0, 1, 0.05),
  };
  const probabilities = ticked("Token probabilities", true);
  const node = element("div", { class: "settings" },
    field("Most tokens", controls.max_tokens), field("Temperature", controls.temperature), field("Top p", controls.top_p),
    probabilities.row);
  return { node, options: () => given(controls), probable: () => probabilities.control.checked, alternatives: ALTERNATIVES };
}

// What an answer came to: its ending, and tokens a second from the first one on.
export class Pace {
  constructor() {
    this.began = performance.now();
    this.first = 0;
  }

  seen() {
    this.first ||= performance.now();
  }

  said(usage, finish) {
    const parts = [];
    if (finish === "length") parts.push("cut at the most tokens");
    if (finish === "stopped") parts.push("stopped");
    if (usage) parts.push(`${usage.completion_tokens} tokens`);
    const seconds = (performance.now() - this.first) / 1000;
    if (usage?.completion_tokens > 2 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.first) parts.push(`first after ${Math.round(this.first - this.began)} ms`);
    return parts.join(" · ");
  }
}
