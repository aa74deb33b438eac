// What is asked of POST /v1/explain about what is on the screen.
// Knows no view and draws nothing.  The one idea: a view asks for just what it draws, and an answer that was had before
// is had again from here, so views need not keep anything.

const PATH = "/v1/explain";
const KEPT = 32; // answers

/**
 * Questions about the model, input and output of `ctx`: an object with `ask(question, signal)`, `layout(signal)`, and the
 * `tokens` and the `output` of the last answer.
 *
 * What a model wrote for the first question is what all later ones are about: it writes once.
 */
export function questions(ctx) {
  const answers = new Map();
  const about = { tokens: [], output: ctx.output };

  about.ask = async (question, signal) => {
    const body = { model: ctx.model.id, input: ctx.input, ...question };
    if (ctx.model.task === "generate" && about.output !== "") body.target ??= { text: about.output };
    const answer = await answered(ctx, answers, body, signal);
    signal.throwIfAborted();
    about.tokens = answer.tokens;
    about.output ||= answer.output;
    ctx.copyable(PATH, body);
    return answer;
  };
  about.layout = (signal) => layoutOf(ctx, answers, signal);
  return about;
}

async function answered(ctx, answers, body, signal) {
  const key = JSON.stringify(body);
  if (!answers.has(key)) {
    const forget = () => answers.delete(key);
    signal.addEventListener("abort", forget);
    const answer = ctx.request(PATH, body, { signal });
    answers.set(key, answer);
    answer.then(() => signal.removeEventListener("abort", forget), forget);
    if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  }
  return answers.get(key);
}

/** {kind: [layers, heads]} of the model's attention: it is the same for every text, so the shortest one is asked about. */
async function layoutOf(ctx, answers, signal) {
  const question = { model: ctx.model.id, input: shortest(ctx), method: "attention", top_k: 1, max_tokens: 1 };
  const { attention } = await answered(ctx, answers, question, signal);
  signal.throwIfAborted();
  return Object.fromEntries(attention.map((entry) => [entry.kind, [entry.layers.length, entry.heads.length]]));
}

/** A text with a gap stays what it is: only the tokenizer knows how a gap is spelled. */
function shortest({ model, input }) {
  if (model.task === "fill") return model.mask || input;
  if (typeof input === "string") return "a";
  return typeof input[0] === "string" ? ["a", "a"] : [{ role: "user", content: "a" }];
}

/** The caller's texts, in the order in which an answer's tokens and characters count them. */
export function textsOf(input) {
  if (typeof input === "string") return [input];
  return input.map((part) => (typeof part === "string" ? part : part.content));
}
