// Attributions over the text: every piece shaded by how much it speaks for what is explained, or against it.
// Knows no request: draws an explanation and the texts that it is about.
//
// For is blue over a whole line, against is orange over a dashed one: nobody needs to tell colours apart.

import { element } from "./dom.js";
import { readout, walked } from "./elements.js";
import { figure, pieces, readable, signed } from "./explanation.js";

const STRONGEST = 8; // pieces in the list of bars

/** Draws the explanation's attributions into `container`, over `texts`: what the caller sent, one string a text. */
export function drawAttributions(container, explanation, texts) {
  const { attributions } = explanation;
  if (attributions.length === 0) {
    container.replaceChildren(element("p", { class: "attn-note" }, "There is nothing to attribute: no token was written."));
    return;
  }
  const body = element("div", { class: "attn-attributed" });
  const show = (index) => body.replaceChildren(...shaded(explanation, attributions[index], texts));
  const several = attributions.length > 1 ? [written(explanation, show)] : [];
  container.replaceChildren(element("div", { class: "attn-attributions" }, ...several, body));
  show(0);
}

/** The tokens that were written; the one that is pointed at or focused is explained. */
function written(explanation, show) {
  const buttons = explanation.attributions.map(({ target }, index) => {
    const chosen = () => pick(index);
    const token = readable(explanation.tokens[target.token]);
    const data = { "data-token": target.token, "aria-pressed": String(index === 0) };
    const on = { onfocus: chosen, onpointerenter: chosen, onclick: chosen };
    return element("button", { type: "button", class: "attn-chip", ...data, ...on }, token);
  });
  const pick = (index) => {
    if (buttons[index].getAttribute("aria-pressed") === "true") return;
    buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === index)));
    show(index);
  };
  const row = element("div", { class: "attn-chips", role: "group", "aria-label": "Tokens that were written" }, ...buttons);
  walked(row, buttons);
  const hint = element("p", { class: "attn-note" }, "Point at a token that was written to see what it rests on.");
  return element("section", {}, element("h4", {}, "What was written"), hint, row);
}

function shaded(explanation, attribution, texts) {
  const scores = [...attribution.tokens, ...attribution.characters.map((piece) => piece.score)];
  const most = Math.max(...scores.map(Math.abs));
  const line = readout("Point at a piece, or walk with the arrow keys, to see its score.");
  const blocks = texts.map((text, index) => textBlock(text, attribution.characters, index, most));
  const marks = blocks.flatMap((block) => [...block.querySelectorAll("[data-score]")]);
  const outside = besides(explanation, attribution, most);
  const whole = element("div", { class: "attn-read" }, ...blocks, ...outside);
  told(whole, [...marks, ...whole.querySelectorAll(".attn-besides [data-score]")], line);
  const bars = strongest(explanation, attribution, most);
  const scale = legend(most, Math.min(...scores) < 0);
  return [goal(explanation, attribution), whole, line, scale, bars, ...completeness(attribution)];
}

/** What is explained: a label, a token, a span, with its score. */
function goal(explanation, { target }) {
  const said = [element("b", {}, nameOf(explanation, target))];
  if (Number.isFinite(target.score)) said.push(`: score ${figure(target.score)}`);
  if (Number.isFinite(target.probability)) said.push(`, probability ${(target.probability * 100).toFixed(1)} %`);
  const asks = explanation.method.startsWith("attention") ? "Where it looks for " : "What speaks for ";
  return element("p", { class: "attn-goal" }, asks, ...said);
}

function nameOf({ tokens }, target) {
  const names = {
    label: () => target.label,
    tag: () => `${readable(tokens[target.token])} as ${target.label}`,
    span: () => `“${target.text}” as the answer`,
    word: () => `“${target.word}” in the gap`,
    similarity: () => `being like “${target.text}”`,
    token: () => `writing ${readable(tokens[target.token])}`,
    text: () => "the text as a whole",
  };
  return (names[target.kind] ?? (() => target.kind))();
}

function textBlock(text, characters, index, most) {
  const scored = characters.filter((piece) => piece.text === index);
  const block = element("p", { class: "attn-text", "data-text": index });
  for (const piece of pieces(text, scored)) {
    block.append(piece.score === null ? piece.text : mark(piece, most));
  }
  return block;
}

function mark({ text, start, end, score }, most) {
  const data = { "data-score": score, "data-start": start, "data-end": end };
  return tinted(element("mark", { class: "attn-piece", ...data }, text), score, most);
}

/** Gives the element the colour and the line of its score. */
function tinted(node, score, most) {
  node.classList.add(score < 0 ? "against" : "for");
  node.style.setProperty("--share", most > 0 ? (Math.abs(score) / most).toFixed(4) : "0");
  return node;
}

/** Tokens that are not the caller's characters: special ones and a template's, and those that were written before. */
function besides({ tokens }, attribution, most) {
  const others = tokens.filter((token) => token.text === null && attribution.tokens[token.index] !== 0);
  const groups = { "Beside the text ": "input", "Written before ": "output" };
  return Object.entries(groups).flatMap(([title, part]) => {
    const marks = others.filter((token) => token.part === part).map((token) => {
      const score = attribution.tokens[token.index];
      const data = { "data-score": score, "data-index": token.index };
      return tinted(element("mark", { class: "attn-piece", ...data }, readable(token)), score, most);
    });
    return marks.length ? [element("p", { class: "attn-besides" }, element("span", {}, title), ...marks)] : [];
  });
}

function told(whole, marks, line) {
  walked(whole, marks);
  const tell = (event) => {
    const piece = event.target.closest("[data-score]");
    if (!piece) return;
    const score = Number(piece.dataset.score);
    Object.assign(line.dataset, { score });
    const number = element("span", { class: "attn-number" }, signed(score, 6));
    const verb = score < 0 ? " speaks against it: " : " speaks for it: ";
    line.replaceChildren(element("b", {}, piece.textContent), verb, number);
  };
  whole.addEventListener("pointerover", tell);
  whole.addEventListener("focusin", tell);
}

function legend(most, against) {
  const sides = [...(against ? ["against"] : []), "for"];
  const ends = [...(against ? [`against ${signed(-most)}`] : []), "0", `for ${signed(most)}`];
  const bar = element("div", { class: "attn-two-ways" }, ...sides.map((side) => element("i", { class: side })));
  return element("div", { class: "attn-legend" }, bar, element("div", {}, ...ends.map((end) => element("span", {}, end))));
}

/** The strongest tokens as bars to both sides. */
function strongest({ tokens }, attribution, most) {
  const order = attribution.tokens.map((score, index) => ({ score, token: tokens[index] }));
  order.sort((one, other) => Math.abs(other.score) - Math.abs(one.score));
  const rows = order.slice(0, STRONGEST).filter(({ score }) => score !== 0);
  const lines = rows.map(({ score, token }) => {
    const bar = tinted(element("i", { class: "attn-bar" }), score, most);
    const track = element("span", { class: "attn-track", "aria-hidden": "true" }, bar);
    return element("li", {}, element("span", {}, readable(token)), track, element("span", { class: "attn-number" }, signed(score)));
  });
  return element("section", {}, element("h4", {}, "Strongest tokens"), element("ol", { class: "attn-strongest" }, ...lines));
}

/** Integrated gradients promise that the attributions sum up to what the text adds to the baseline's score. */
function completeness({ completeness: sums }) {
  if (!sums) return [];
  const [difference, sum, delta] = [sums.difference, sums.sum, sums.delta].map((number) => signed(number, 4));
  const said = `The text adds ${difference} to the baseline’s score; the attributions sum up to ${sum} (off by ${delta}).`;
  const verdict = sums.holds ? "Complete" : "Not complete: ask for more steps";
  const badge = element("b", { class: sums.holds ? "attn-holds" : "attn-fails" }, verdict);
  return [element("p", { class: "attn-completeness" }, badge, " ", said)];
}
