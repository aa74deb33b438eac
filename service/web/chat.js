// The form for a generator with a chat template.
//
// Each request has the whole conversation that is on the screen.

import { element } from "./dom.js";
import { textArea, field } from "./form.js";
import { samplingFields, GenerationTimer } from "./generation.js";
import { CHATS } from "./samples.js";
import { TokenText } from "./tokens.js";

const PATH = "/v1/chat/completions";

export function mountChat(container, page) {
  const chat = new Chat(page);
  container.replaceChildren(chat.node);
  chat.preview();
  return chat;
}

class Chat {
  constructor(page) {
    this.page = page;
    this.turns = []; // {role, content}
    this.controller = null;
    this.system = textArea("", 2);
    this.sampling = samplingFields(page.model);
    this.message = textArea("", 2);
    this.message.setAttribute("enterkeyhint", "send");
    this.conversation = element("ol", { class: "talk", "aria-label": "Conversation", "aria-live": "polite" });
    this.error = element("p", { class: "error", role: "alert" });
    this.sendButton = element("button", { type: "submit" }, "Send");
    this.stopButton = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.abort() }, "Stop");
    this.regenerateButton = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.regenerate() }, "Regenerate");
    this.newButton = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.clear() }, "New conversation");
    const suggestions = CHATS.map((words) =>
      element("button", { type: "button", class: "quiet", onclick: () => this.sendMessage(words) }, words));
    this.suggestions = element("div", { class: "row", role: "group", "aria-label": "Examples" }, ...suggestions);
    this.node = element("div", { class: "sides chat" }, this.messageForm(),
      element("div", { class: "ask" }, field("System prompt", this.system), this.sampling.node));
    this.node.addEventListener("input", () => this.preview());
  }

  messageForm() {
    const form = element("form", { class: "ask", "aria-label": "New message" }, field("Message", this.message),
      element("div", { class: "row" }, this.sendButton, this.stopButton, this.regenerateButton, this.newButton), this.error);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendMessage(this.message.value.trim());
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    return element("div", {}, this.conversation, this.suggestions, form);
  }

  body(turns) {
    const system = this.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
    const logprobs = this.sampling.wantsLogprobs() ? { logprobs: true, top_logprobs: this.sampling.alternatives } : {};
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { model: this.page.model.id, messages, ...this.sampling.options(), ...logprobs, ...stream };
  }

  // Shows the request for the unsent message, or without one the last request.
  preview() {
    const words = this.message.value.trim();
    const turns = words || !this.turns.length ? [...this.turns, { role: "user", content: words || CHATS[0] }] : this.askedTurns();
    this.page.showRequest(PATH, this.body(turns));
  }

  // The conversation up to the last message of the user.
  askedTurns() {
    return this.turns.slice(0, this.turns.findLastIndex((turn) => turn.role === "user") + 1);
  }

  explainSubject() {
    const turns = this.turns.length ? this.askedTurns() : [{ role: "user", content: CHATS[0] }];
    const output = this.turns.at(-1)?.role === "assistant" ? this.turns.at(-1).content : "";
    return { input: this.body(turns).messages, output, target: output ? { text: output } : null };
  }

  sendMessage(words) {
    if (!words || this.controller) return;
    this.turns.push({ role: "user", content: words });
    this.conversation.append(turn("user", element("div", { class: "said" }, words)));
    this.message.value = "";
    this.answer();
  }

  regenerate() {
    if (this.controller) return;
    if (this.turns.at(-1)?.role === "assistant") {
      this.turns.pop();
      this.conversation.lastElementChild.remove();
    }
    this.answer();
  }

  clear() {
    this.abort();
    this.turns = [];
    this.conversation.replaceChildren();
    this.showState(false);
    this.preview();
    this.message.focus();
  }

  abort() {
    this.controller?.abort();
  }

  showState(busy) {
    this.stopButton.hidden = !busy;
    this.sendButton.disabled = busy;
    this.regenerateButton.hidden = this.newButton.hidden = busy || !this.turns.length;
    this.suggestions.hidden = this.turns.length > 0;
    this.conversation.setAttribute("aria-busy", String(busy));
  }

  async answer() {
    const answerNode = element("div", { class: "said" });
    const note = element("p", { class: "hint" });
    const controller = (this.controller = new AbortController());
    const answer = { role: "assistant", content: "" };
    const item = turn("assistant", answerNode, note);
    const timer = new GenerationTimer();
    this.error.textContent = "";
    this.conversation.append(item);
    this.showState(true);
    this.page.showRequest(PATH, this.body(this.turns));
    try {
      note.textContent = await this.readAnswer(answer, new TokenText(answerNode), timer, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") note.textContent = timer.summarize(null, "stopped");
      else this.error.textContent = error.message;
    }
    this.controller = null;
    if (answer.content && item.isConnected) this.turns.push(answer);
    else item.remove();
    this.showState(false);
    this.page.onChange();
  }

  async readAnswer(answer, text, timer, signal) {
    let usage = null;
    let finish = "";
    for await (const event of this.page.events(PATH, this.body(this.turns), signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const words = choice.delta.content ?? "";
      if (words) timer.recordToken();
      finish = choice.finish_reason ?? finish;
      answer.content += words;
      text.add(words, (choice.logprobs?.content ?? []).map(readToken));
    }
    return timer.summarize(usage, finish);
  }
}

function readToken(token) {
  const top = token.top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob }));
  return { text: token.token, bytes: token.bytes, logprob: token.logprob, top };
}

function turn(role, ...content) {
  const speaker = role === "user" ? "You" : "Model";
  return element("li", { class: `turn ${role}` }, element("p", { class: "who" }, speaker), ...content);
}
