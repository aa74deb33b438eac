// The form for a generator without a chat template: it continues a text.

import { element } from "./dom.js";
import { textArea, answerSection, requestForm, showHint, exampleButtons, field, showSideBySide } from "./form.js";
import { samplingFields, GenerationTimer } from "./generation.js";
import { PROMPTS } from "./samples.js";
import { TokenText } from "./tokens.js";

const PATH = "/v1/completions";

export function mountCompletion(container, page) {
  const prompt = textArea(PROMPTS[0], 6);
  const settings = samplingFields(page.model, true);
  const place = answerSection();
  let output = "";
  let input = "";

  function request() {
    const logprobs = settings.wantsLogprobs() ? { logprobs: settings.alternatives } : {};
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { path: PATH, body: { model: page.model.id, prompt: prompt.value, ...settings.options(), ...logprobs, ...stream } };
  }

  async function send({ path, body }, signal) {
    const answerNode = element("span");
    const note = element("p", { class: "hint" });
    const timer = new GenerationTimer();
    place.replaceChildren(element("p", { class: "said" }, element("span", { class: "given" }, body.prompt), answerNode), note);
    const text = new TokenText(answerNode);
    [input, output] = [body.prompt, ""];
    let [usage, finish] = [null, "stopped"];
    place.setAttribute("aria-busy", "true");
    try {
      for await (const event of page.events(path, body, signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        if (choice.text) timer.recordToken();
        finish = choice.finish_reason ?? finish;
        output += choice.text;
        text.add(choice.text, readTokens(choice.logprobs));
      }
    } finally {
      note.textContent = timer.summarize(usage, finish);
      place.setAttribute("aria-busy", "false");
    }
  }

  const form = requestForm(page, {
    fields: [field("Prompt", prompt), settings.node, exampleButtons(PROMPTS, (text) => { prompt.value = text; form.run(); })],
    button: "Continue", request, send,
  });
  showHint(place, "The completion appears here.");
  showSideBySide(container, form, place);
  return {
    explainSubject: () => output ? { input, output, target: { text: output } } : { input: prompt.value, output: "" },
    abort: form.abort,
  };
}

// The log probabilities of /v1/completions are parallel lists.
function readTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text, bytes: null, logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([each, logprob]) => ({ text: each, logprob })),
  }));
}
