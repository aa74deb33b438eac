// What chat and completion have in common: how an answer is drawn from a generator.

import { amount, field, ticked } from "./form.js";
import { element } from "./dom.js";

const ALTERNATIVES = 5;

export function drawing({ tokens = 128, temperature = 0.7 } = {}) {
  const controls = {
    max_tokens: amount(tokens, 1, 100000),
    temperature: amount(temperature, 0, 2, 0.1),
    top_p: amount(0.95, 0, 1, 0.05),
  };
  const probabilities = ticked("Token probabilities", true);
  const node = element("div", { class: "settings" },
    field("Most tokens", controls.max_tokens), field("Temperature", controls.temperature), field("Top p", controls.top_p),
    probabilities.row);
  const options = () => Object.fromEntries(
    Object.entries(controls).filter(([, each]) => each.value !== "").map(([name, each]) => [name, Number(each.value)]));
  return { node, options, probable: () => probabilities.control.checked, alternatives: ALTERNATIVES };
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
