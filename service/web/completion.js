// A text continued, by a generator that knows no conversations.

import { element } from "./dom.js";
import { area, answerPlace, asking, empty, examples, field, sides } from "./form.js";
import { drawing, Pace } from "./generation.js";
import { PROMPTS } from "./samples.js";
import { TokenText } from "./tokens.js";

const PATH = "/v1/completions";

export function mountCompletion(container, page) {
  const prompt = area(PROMPTS[0], 6);
  const settings = drawing(page.model);
  const place = answerPlace();
  let output = "";
  let input = "";

  function request() {
    const scored = settings.probable() ? { logprobs: settings.alternatives } : {};
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { path: PATH, body: { model: page.model.id, prompt: prompt.value, ...settings.options(), ...scored, ...stream } };
  }

  async function ask({ path, body }, signal) {
    const said = element("span");
    const note = element("p", { class: "hint" });
    const pace = new Pace();
    place.replaceChildren(element("p", { class: "said" }, element("span", { class: "given" }, body.prompt), said), note);
    const text = new TokenText(said);
    [input, output] = [body.prompt, ""];
    let [usage, finish] = [null, "stopped"];
    place.setAttribute("aria-busy", "true");
    try {
      for await (const event of page.events(path, body, signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        if (choice.text) pace.seen();
        finish = choice.finish_reason ?? finish;
        output += choice.text;
        text.add(choice.text, tokensOf(choice.logprobs));
      }
    } finally {
      note.textContent = pace.said(usage, finish);
      place.setAttribute("aria-busy", "false");
    }
  }

  const form = asking(page, {
    fields: [field("Text to go on with", prompt), settings.node, examples(PROMPTS, (text) => { prompt.value = text; form.submitted(); })],
    button: "Continue", request, ask,
  });
  empty(place, "The text goes on here.");
  sides(container, form, place);
  return {
    asked: () => output ? { input, output, target: { text: output } } : { input: prompt.value, output: "" },
    leave: form.leave,
  };
}

// The older shape: lists beside each other.
function tokensOf(logprobs) {
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text, bytes: null, logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([each, logprob]) => ({ text: each, logprob })),
  }));
}
