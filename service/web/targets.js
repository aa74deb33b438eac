// The target of an explanation: a label, a token's tag, a span, a word, a similarity or a generated text; one form for
// each task. The target null is the answer of the model.

import { choice, field } from "./elements.js";
import { displayText } from "./explanation.js";

const DEFAULT = ""; // the value of the option "the model's answer"
const FORMS = {
  classify: labelForm,
  tag: tagForm,
  span: spanForm,
  fill: wordForm,
  embed: similarityForm,
  generate: generatedForm,
};

/** Fields for the target of `session`; changing one sets state.target and calls session.refresh. */
export function targetFields(session) {
  const set = (target) => {
    session.state.target = target;
    session.refresh();
  };
  return (FORMS[session.ctx.model.task] ?? (() => []))(session, session.state.target ?? {}, set);
}

/** A sentence that names the missing target; "" if none is missing. */
export function missingTargetNote(session) {
  const isMissing = session.ctx.model.task === "embed" && !session.state.target?.text;
  return isMissing ? "Enter a text to compare with: one vector has no score to explain." : "";
}

function labelForm({ ctx }, target, set) {
  const labels = ctx.model.labels ?? [];
  if (labels.length < 2) return [];
  const options = [[DEFAULT, "the model's answer"], ...labels.map((label) => [label, label])];
  return [choice("Label", options, target.label ?? DEFAULT, (label) => set(label === DEFAULT ? null : { label }))];
}

/** The tokens of the input text with index `text`, or of all input texts, as options. */
function tokenOptions({ explainer }, text) {
  const inputTokens = explainer.tokens.filter((token) => token.part === "input" && token.text !== null);
  const selected = inputTokens.filter((token) => text === undefined || token.text === text);
  return selected.map((token) => [token.index, `${token.index} ${displayText(token)}`]);
}

function tagForm(session, target, set) {
  const options = [[DEFAULT, "the most likely tag"], ...tokenOptions(session)];
  const labels = [[DEFAULT, "its most likely tag"], ...(session.ctx.model.labels ?? []).map((label) => [label, label])];
  const token = session.explainer.tokens.find((one) => one.text !== null && one.start === target.start);
  const index = target.token ?? token?.index ?? DEFAULT;
  const change = (chosen, label) => {
    if (chosen === DEFAULT) set(null);
    else set(label === DEFAULT ? { token: Number(chosen) } : { token: Number(chosen), label });
  };
  const fields = [choice("Token", options, index, (chosen) => change(chosen, target.label ?? DEFAULT))];
  if (index !== DEFAULT) fields.push(choice("Tag", labels, target.label ?? DEFAULT, (label) => change(index, label)));
  return fields;
}

function spanForm(session, target, set) {
  const options = tokenOptions(session, 1);
  const tokens = session.explainer.tokens.filter((token) => token.text === 1);
  const first = tokens.find((token) => token.start === target.start)?.index ?? DEFAULT;
  const last = tokens.findLast((token) => token.end === target.end)?.index ?? DEFAULT;
  const change = (from, to) => {
    if (from === DEFAULT) return set(null);
    const end = session.explainer.tokens[to === DEFAULT ? from : Math.max(from, to)].end;
    return set({ start: session.explainer.tokens[from].start, end });
  };
  const fields = [choice("From", [[DEFAULT, "the model's answer"], ...options], first, (chosen) => change(chosen, last))];
  if (first === DEFAULT) return fields;
  const laterOptions = options.filter(([index]) => index >= first);
  return [...fields, choice("To", laterOptions, last, (chosen) => change(first, Number(chosen)))];
}

function wordForm(session, target, set) {
  const attributes = { value: target.word ?? "", placeholder: "the most likely word", size: 14 };
  return [field("Word", attributes, (word) => set(word === "" ? null : { mask: target.mask ?? 0, word }))];
}

function similarityForm(session, target, set) {
  const attributes = { value: target.text ?? "", placeholder: "another text", size: 32 };
  return [field("Compared with", attributes, (text) => set(text === "" ? null : { text }))];
}

function generatedForm(session, target, set) {
  const attributes = { value: target.text ?? session.explainer.output, placeholder: "the generated text", size: 32 };
  return [field("Generated text", attributes, (text) => set(text === "" ? null : { text }))];
}
