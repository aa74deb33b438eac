// Requests to POST /v1/explain about the input and the answer on the screen.
// A view requests what it draws. Answers are cached here, so views need not store anything.

import { ApiError } from "./api.js";

const PATH = "/v1/explain";
const MAX_ANSWERS = 32; // cached answers

/**
 * Requests about the model, input and output of `ctx`: an object with `request(parameters, {signal, onProgress})`,
 * `layout(signal)`, and the `tokens` and the `output` of the last answer. `onProgress` is called with the share of the
 * work that the server has done, from 0 to 1, whenever it has grown.
 *
 * A model generates once: the output of the first answer is the target of all later requests.
 */
export function createExplainer(ctx) {
  const answers = new Map();
  const explainer = { tokens: [], output: ctx.output };

  explainer.request = async (parameters, { signal, onProgress }) => {
    const body = { model: ctx.model.id, input: ctx.input, ...parameters };
    if (ctx.model.task === "generate" && explainer.output !== "") body.target ??= { text: explainer.output };
    const answer = await cachedAnswer(ctx, answers, body, { signal, onProgress });
    signal.throwIfAborted();
    explainer.tokens = answer.tokens;
    explainer.output ||= answer.output;
    ctx.showRequest(PATH, body);
    return answer;
  };
  explainer.layout = (signal) => readLayout(ctx, answers, signal);
  return explainer;
}

async function cachedAnswer(ctx, answers, body, { signal, onProgress }) {
  const key = JSON.stringify(body);
  if (!answers.has(key)) {
    const remove = () => answers.delete(key);
    signal.addEventListener("abort", remove);
    const answer = readExplanation(ctx.events(PATH, body, signal), onProgress);
    answers.set(key, answer);
    answer.then(() => signal.removeEventListener("abort", remove), remove);
    if (answers.size > MAX_ANSWERS) answers.delete(answers.keys().next().value);
  }
  return answers.get(key);
}

/** The explanation, which is the last of the server's events. Those before it say how much of the work is done. */
async function readExplanation(events, onProgress) {
  for await (const event of events) {
    if (event.progress === undefined) return event;
    onProgress(event.progress);
  }
  throw new ApiError("The server ended the answer early.", 0);
}

/** {kind: [layers, heads]} of the model's attention. It is the same for every text, so the request has a short one. */
async function readLayout(ctx, answers, signal) {
  const question = { model: ctx.model.id, input: shortestInput(ctx), method: "attention", top_k: 1, max_tokens: 1 };
  const { attention } = await cachedAnswer(ctx, answers, question, { signal, onProgress: () => {} });
  signal.throwIfAborted();
  return Object.fromEntries(attention.map((entry) => [entry.kind, [entry.layers.length, entry.heads.length]]));
}

/** A short input. A text with a mask is not shortened, because the mask depends on the tokenizer. */
function shortestInput({ model, input }) {
  if (model.task === "fill") return model.mask || input;
  if (typeof input === "string") return "a";
  return typeof input[0] === "string" ? ["a", "a"] : [{ role: "user", content: "a" }];
}

/** {label, text} of each text of the input that can be edited; of messages, the last one. */
export function editableTexts(input) {
  if (typeof input === "string") return [{ label: "Explained text", text: input }];
  if (typeof input[0] === "string") return input.map((text, index) => ({ label: `Explained text ${index + 1}`, text }));
  return [{ label: "Explained message", text: input.at(-1)?.content ?? "" }];
}

/** The input with other texts, in the order of `editableTexts`. */
export function replaceTexts(input, texts) {
  if (typeof input === "string") return texts[0];
  if (typeof input[0] === "string") return texts;
  return texts[0] ? [...input.slice(0, -1), { ...input.at(-1), content: texts[0] }] : [];
}

/** The texts of the input, in the order of the indexes in the answer's tokens and characters. */
export function inputTexts(input) {
  if (typeof input === "string") return [input];
  return input.map((part) => (typeof part === "string" ? part : part.content));
}
