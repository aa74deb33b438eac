// What is to be explained: a label, a token's tag, a span, a word, a likeness, a written text; one form for each task.
// Knows no method and asks nothing.  A target that is null is what the server itself answers.

import { choice, field } from "./elements.js";
import { readable } from "./explanation.js";

const OWN = ""; // the value of "what the model answers"
const FORMS = {
  classify: labelForm,
  tag: tagForm,
  span: spanForm,
  fill: wordForm,
  embed: likenessForm,
  generate: writtenForm,
};

/** Fields for the target of `session`; changing one sets state.target and calls session.refresh. */
export function targetFields(session) {
  const set = (target) => {
    session.state.target = target;
    session.refresh();
  };
  return (FORMS[session.ctx.model.task] ?? (() => []))(session, session.state.target ?? {}, set);
}

/** What must be given before there can be an answer, as a sentence; "" if nothing. */
export function missing(session) {
  const alone = session.ctx.model.task === "embed" && !session.state.target?.text;
  return alone ? "Write a text to compare with: a vector alone has no score to explain." : "";
}

function labelForm({ ctx }, target, set) {
  const labels = ctx.model.labels ?? [];
  if (labels.length < 2) return [];
  const options = [[OWN, "what the model answers"], ...labels.map((label) => [label, label])];
  return [choice("Label", options, target.label ?? OWN, (label) => set(label === OWN ? null : { label }))];
}

/** Tokens of the caller's text `text`, or of any of them, as options. */
function tokenOptions({ about }, text) {
  const own = about.tokens.filter((token) => token.part === "input" && token.text !== null);
  const wanted = own.filter((token) => text === undefined || token.text === text);
  return wanted.map((token) => [token.index, `${token.index} ${readable(token)}`]);
}

function tagForm(session, target, set) {
  const options = [[OWN, "the surest one"], ...tokenOptions(session)];
  const labels = [[OWN, "its likeliest"], ...(session.ctx.model.labels ?? []).map((label) => [label, label])];
  const token = session.about.tokens.find((one) => one.text !== null && one.start === target.start);
  const index = target.token ?? token?.index ?? OWN;
  const change = (chosen, label) => {
    if (chosen === OWN) set(null);
    else set(label === OWN ? { token: Number(chosen) } : { token: Number(chosen), label });
  };
  const fields = [choice("Token", options, index, (chosen) => change(chosen, target.label ?? OWN))];
  if (index !== OWN) fields.push(choice("Tag", labels, target.label ?? OWN, (label) => change(index, label)));
  return fields;
}

function spanForm(session, target, set) {
  const options = tokenOptions(session, 1);
  const tokens = session.about.tokens.filter((token) => token.text === 1);
  const first = tokens.find((token) => token.start === target.start)?.index ?? OWN;
  const last = tokens.findLast((token) => token.end === target.end)?.index ?? OWN;
  const change = (from, to) => {
    if (from === OWN) return set(null);
    const end = session.about.tokens[to === OWN ? from : Math.max(from, to)].end;
    return set({ start: session.about.tokens[from].start, end });
  };
  const fields = [choice("From", [[OWN, "the best span"], ...options], first, (chosen) => change(chosen, last))];
  if (first === OWN) return fields;
  const behind = options.filter(([index]) => index >= first);
  return [...fields, choice("To", behind, last, (chosen) => change(first, Number(chosen)))];
}

function wordForm(session, target, set) {
  const attributes = { value: target.word ?? "", placeholder: "the likeliest", size: 14 };
  return [field("Word", attributes, (word) => set(word === "" ? null : { mask: target.mask ?? 0, word }))];
}

function likenessForm(session, target, set) {
  const attributes = { value: target.text ?? "", placeholder: "another text", size: 32 };
  return [field("Compared with", attributes, (text) => set(text === "" ? null : { text }))];
}

function writtenForm(session, target, set) {
  const attributes = { value: target.text ?? session.about.output, placeholder: "what the model writes", size: 32 };
  return [field("Written", attributes, (text) => set(text === "" ? null : { text }))];
}
