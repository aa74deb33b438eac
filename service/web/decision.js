// The answer to a question about a text: the chosen option, a bar for every option, and how far it can be trusted.

import { drawAttributions } from "./attributions.js";
import { bars } from "./bars.js";
import { element, number, percent } from "./dom.js";

const LOW_MASS = 0.5; // the probability of all options together below which the page warns

// `question` is the question of the request about the text `state`, `diagnostics` has the mass of the labels.
export function drawAnswer(name, { question, state }, answer, { label_mass: mass, argmax_is_label: isLabel }) {
  const rows = Object.entries(answer.probabilities).map(([option, share]) => ({
    name: answer.legend?.[option] ?? option, share, figure: percent(share),
  }));
  const chosen = rows.reduce((best, row) => (row.share > best.share ? row : best));
  chosen.top = true;
  const top = chosen.name;
  const headline = answer.type === "score" ? `${top} (mean level ${number(answer.score)} of 0 to ${rows.length - 1})` : top;
  const title = element("h3", {}, name, element("span", { class: "given" }, ` ${question.instructions}`));
  return element("section", { class: "decision", "aria-label": name }, title, element("p", { class: "headline" }, headline),
    bars(rows, `Options of ${name}`), ...figures(answer, mass, isLabel), explained(answer, state));
}

// The text with the attributions of the likeliest option.
function explained({ explanation }, state) {
  if (!explanation) return null;
  const place = element("div", { class: "attn explained" });
  drawAttributions(place, explanation, [state]);
  return place;
}

function figures(answer, mass, isLabel) {
  const parts = [`Confidence ${percent(answer.confidence)}`, `label mass ${percent(mass)}`];
  if (answer.calibration) parts.push(`calibrated by ${answer.calibration}`);
  const isLow = mass < LOW_MASS || !isLabel;
  const warning = isLabel
    ? `Low label mass: answers that are none of the options have ${percent(1 - mass)} of the probability.`
    : "The likeliest answer of the model is none of the options.";
  return [element("p", { class: "hint" }, parts.join(" · ")), isLow ? element("p", { class: "hint low" }, warning) : null];
}
