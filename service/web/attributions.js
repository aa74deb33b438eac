// Attributions over the text: every piece is shaded by its score, for or against the target.
// Input: an explanation and the texts that it is about.
//
// A positive score is blue with a solid underline, a negative one orange with a dashed underline, so colour is not
// needed to distinguish them.

import { element } from "./dom.js";
import { readout, addArrowKeys } from "./elements.js";
import { formatNumber, splitByScores, displayText, formatSigned } from "./explanation.js";

const MAX_BARS = 8; // tokens in the list of bars

/** Draws the explanation's attributions into `container`, over `texts`: the texts of the request. */
export function drawAttributions(container, explanation, texts) {
  const { attributions } = explanation;
  if (attributions.length === 0) {
    container.replaceChildren(element("p", { class: "attn-note" }, "There is nothing to attribute: no token was generated."));
    return;
  }
  const body = element("div", { class: "attn-attributed" });
  const show = (index) => body.replaceChildren(...attributionNodes(explanation, attributions[index], texts));
  const chooser = attributions.length > 1 ? [tokenChooser(explanation, show)] : [];
  container.replaceChildren(element("div", { class: "attn-attributions" }, ...chooser, body));
  show(0);
}

/** A button for each generated token; the attribution of the one under the pointer or the focus is shown. */
function tokenChooser(explanation, show) {
  const buttons = explanation.attributions.map(({ target }, index) => {
    const onPick = () => pick(index);
    const token = displayText(explanation.tokens[target.token]);
    const data = { "data-token": target.token, "aria-pressed": String(index === 0) };
    const listeners = { onfocus: onPick, onpointerenter: onPick, onclick: onPick };
    return element("button", { type: "button", class: "attn-chip", ...data, ...listeners }, token);
  });
  const pick = (index) => {
    if (buttons[index].getAttribute("aria-pressed") === "true") return;
    buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === index)));
    show(index);
  };
  const row = element("div", { class: "attn-chips", role: "group", "aria-label": "Generated tokens" }, ...buttons);
  addArrowKeys(row, buttons);
  const hint = element("p", { class: "attn-note" }, "Point at a generated token to see its attribution.");
  return element("section", {}, element("h4", {}, "Generated text"), hint, row);
}

function attributionNodes(explanation, attribution, texts) {
  const scores = [...attribution.tokens, ...attribution.characters.map((piece) => piece.score)];
  const maximum = Math.max(...scores.map(Math.abs));
  const line = readout("Point at a piece, or move with the arrow keys, to see its score.");
  const blocks = texts.map((text, index) => textBlock(text, attribution.characters, index, maximum));
  const marks = blocks.flatMap((block) => [...block.querySelectorAll("[data-score]")]);
  const outside = tokensOutsideTexts(explanation, attribution, maximum);
  const whole = element("div", { class: "attn-read" }, ...blocks, ...outside);
  showScores(whole, [...marks, ...whole.querySelectorAll(".attn-besides [data-score]")], line);
  const bars = strongestTokens(explanation, attribution, maximum);
  const scale = scaleLegend(maximum, Math.min(...scores) < 0);
  return [targetLine(explanation, attribution), whole, line, scale, bars, ...completenessLine(attribution)];
}

/** The target of the explanation (a label, a token, a span) and its score. */
function targetLine(explanation, { target }) {
  const parts = [element("b", {}, describeTarget(explanation, target))];
  if (Number.isFinite(target.score)) parts.push(`: score ${formatNumber(target.score)}`);
  if (Number.isFinite(target.probability)) parts.push(`, probability ${(target.probability * 100).toFixed(1)} %`);
  const prefix = explanation.method.startsWith("attention") ? "Attention for " : "Attributions for ";
  return element("p", { class: "attn-goal" }, prefix, ...parts);
}

function describeTarget({ tokens }, target) {
  const names = {
    label: () => target.label,
    tag: () => `${displayText(tokens[target.token])} as ${target.label}`,
    span: () => `“${target.text}” as the answer`,
    word: () => `“${target.word}” at the mask`,
    similarity: () => `similarity to “${target.text}”`,
    token: () => `generating ${displayText(tokens[target.token])}`,
    text: () => "the text as a whole",
    option: () => target.option,
  };
  return (names[target.kind] ?? (() => target.kind))();
}

function textBlock(text, characters, index, maximum) {
  const scored = characters.filter((piece) => piece.text === index);
  const block = element("p", { class: "attn-text", "data-text": index });
  for (const piece of splitByScores(text, scored)) {
    block.append(piece.score === null ? piece.text : scoreMark(piece, maximum));
  }
  return block;
}

function scoreMark({ text, start, end, score }, maximum) {
  const data = { "data-score": score, "data-start": start, "data-end": end };
  return colourByScore(element("mark", { class: "attn-piece", ...data }, text), score, maximum);
}

/** Sets the colour and the underline of a score on the element. */
function colourByScore(node, score, maximum) {
  node.classList.add(score < 0 ? "against" : "for");
  node.style.setProperty("--share", maximum > 0 ? (Math.abs(score) / maximum).toFixed(4) : "0");
  return node;
}

/** Scored tokens without characters in the texts: special tokens, those of a template, and tokens generated before. */
function tokensOutsideTexts({ tokens }, attribution, maximum) {
  const others = tokens.filter((token) => token.text === null && attribution.tokens[token.index] !== 0);
  const groups = { "Outside the text ": "input", "Generated before ": "output" };
  return Object.entries(groups).flatMap(([title, part]) => {
    const marks = others.filter((token) => token.part === part).map((token) => {
      const score = attribution.tokens[token.index];
      const data = { "data-score": score, "data-index": token.index };
      return colourByScore(element("mark", { class: "attn-piece", ...data }, displayText(token)), score, maximum);
    });
    return marks.length ? [element("p", { class: "attn-besides" }, element("span", {}, title), ...marks)] : [];
  });
}

function showScores(root, marks, line) {
  addArrowKeys(root, marks);
  const showScore = (event) => {
    const piece = event.target.closest("[data-score]");
    if (!piece) return;
    const score = Number(piece.dataset.score);
    Object.assign(line.dataset, { score });
    const number = element("span", { class: "attn-number" }, formatSigned(score, 6));
    const verb = score < 0 ? " counts against it: " : " counts for it: ";
    line.replaceChildren(element("b", {}, piece.textContent), verb, number);
  };
  root.addEventListener("pointerover", showScore);
  root.addEventListener("focusin", showScore);
}

function scaleLegend(maximum, hasNegative) {
  const directions = [...(hasNegative ? ["against"] : []), "for"];
  const labels = [...(hasNegative ? [`against ${formatSigned(-maximum)}`] : []), "0", `for ${formatSigned(maximum)}`];
  const bar = element("div", { class: "attn-two-ways" }, ...directions.map((side) => element("i", { class: side })));
  return element("div", { class: "attn-legend" }, bar, element("div", {}, ...labels.map((end) => element("span", {}, end))));
}

/** The tokens with the largest absolute scores, as bars. */
function strongestTokens({ tokens }, attribution, maximum) {
  const order = attribution.tokens.map((score, index) => ({ score, token: tokens[index] }));
  order.sort((one, other) => Math.abs(other.score) - Math.abs(one.score));
  const rows = order.slice(0, MAX_BARS).filter(({ score }) => score !== 0);
  const lines = rows.map(({ score, token }) => {
    const bar = colourByScore(element("i", { class: "attn-bar" }), score, maximum);
    const track = element("span", { class: "attn-track", "aria-hidden": "true" }, bar);
    return element("li", {}, element("span", {}, displayText(token)), track, element("span", { class: "attn-number" }, formatSigned(score)));
  });
  return element("section", {}, element("h4", {}, "Strongest tokens"), element("ol", { class: "attn-strongest" }, ...lines));
}

/** For integrated gradients: the attributions sum up to the difference between the text's score and the baseline's. */
function completenessLine({ completeness: sums }) {
  if (!sums) return [];
  const [difference, sum, delta] = [sums.difference, sums.sum, sums.delta].map((number) => formatSigned(number, 4));
  const sentence = `The text adds ${difference} to the baseline’s score; the attributions sum up to ${sum} (off by ${delta}).`;
  const verdict = sums.holds ? "Complete" : "Not complete: use more steps";
  const badge = element("b", { class: sums.holds ? "attn-holds" : "attn-fails" }, verdict);
  return [element("p", { class: "attn-completeness" }, badge, " ", sentence)];
}
