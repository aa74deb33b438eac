// A conversation with a generator that has a template for one.
//
// The one idea: what is asked is always the whole conversation, as it stands on the screen.

import { element } from "./dom.js";
import { area, field } from "./form.js";
import { drawing, Pace } from "./generation.js";
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
    this.running = null;
    this.system = area("", 2);
    this.drawing = drawing(page.model);
    this.words = area("", 2);
    this.words.setAttribute("enterkeyhint", "send");
    this.talk = element("ol", { class: "talk", "aria-label": "Conversation", "aria-live": "polite" });
    this.error = element("p", { class: "error", role: "alert" });
    this.send = element("button", { type: "submit" }, "Send");
    this.stop = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.leave() }, "Stop");
    this.again = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.regenerate() }, "Regenerate");
    this.fresh = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.clear() }, "New conversation");
    const suggestions = CHATS.map((words) =>
      element("button", { type: "button", class: "quiet", onclick: () => this.say(words) }, words));
    this.suggestions = element("div", { class: "row", role: "group", "aria-label": "Examples" }, ...suggestions);
    this.node = element("div", { class: "sides chat" }, this.composer(),
      element("div", { class: "ask" }, field("System prompt", this.system), this.drawing.node));
    this.node.addEventListener("input", () => this.preview());
  }

  composer() {
    const form = element("form", { class: "ask", "aria-label": "Your turn" }, field("Message", this.words),
      element("div", { class: "row" }, this.send, this.stop, this.again, this.fresh), this.error);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.say(this.words.value.trim());
    });
    this.words.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    return element("div", {}, this.talk, this.suggestions, form);
  }

  body(turns) {
    const system = this.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
    const scored = this.drawing.probable() ? { logprobs: true, top_logprobs: this.drawing.alternatives } : {};
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { model: this.page.model.id, messages, ...this.drawing.options(), ...scored, ...stream };
  }

  // Of what is written and not sent yet; else of what was asked last.
  preview() {
    const words = this.words.value.trim();
    const asked = words || !this.turns.length ? [...this.turns, { role: "user", content: words || CHATS[0] }] : this.question();
    this.page.copyable(PATH, this.body(asked));
  }

  // The conversation up to what was asked last.
  question() {
    return this.turns.slice(0, this.turns.findLastIndex((turn) => turn.role === "user") + 1);
  }

  asked() {
    const turns = this.turns.length ? this.question() : [{ role: "user", content: CHATS[0] }];
    const output = this.turns.at(-1)?.role === "assistant" ? this.turns.at(-1).content : "";
    return { input: this.body(turns).messages, output, target: output ? { text: output } : null };
  }

  say(words) {
    if (!words || this.running) return;
    this.turns.push({ role: "user", content: words });
    this.talk.append(turn("user", element("div", { class: "said" }, words)));
    this.words.value = "";
    this.answer();
  }

  regenerate() {
    if (this.running) return;
    if (this.turns.at(-1)?.role === "assistant") {
      this.turns.pop();
      this.talk.lastElementChild.remove();
    }
    this.answer();
  }

  clear() {
    this.leave();
    this.turns = [];
    this.talk.replaceChildren();
    this.show(false);
    this.preview();
    this.words.focus();
  }

  leave() {
    this.running?.abort();
  }

  show(busy) {
    this.stop.hidden = !busy;
    this.send.disabled = busy;
    this.again.hidden = this.fresh.hidden = busy || !this.turns.length;
    this.suggestions.hidden = this.turns.length > 0;
    this.talk.setAttribute("aria-busy", String(busy));
  }

  async answer() {
    const said = element("div", { class: "said" });
    const note = element("p", { class: "hint" });
    const mine = (this.running = new AbortController());
    const answer = { role: "assistant", content: "" };
    const item = turn("assistant", said, note);
    const pace = new Pace();
    this.error.textContent = "";
    this.talk.append(item);
    this.show(true);
    this.page.copyable(PATH, this.body(this.turns));
    try {
      note.textContent = await this.written(answer, new TokenText(said), pace, mine.signal);
    } catch (problem) {
      if (problem.name === "AbortError") note.textContent = pace.said(null, "stopped");
      else this.error.textContent = problem.message;
    }
    this.running = null;
    if (answer.content && item.isConnected) this.turns.push(answer);
    else item.remove();
    this.show(false);
    this.page.changed();
  }

  async written(answer, text, pace, signal) {
    let usage = null;
    let finish = "";
    for await (const event of this.page.events(PATH, this.body(this.turns), signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const words = choice.delta.content ?? "";
      if (words) pace.seen();
      finish = choice.finish_reason ?? finish;
      answer.content += words;
      text.add(words, (choice.logprobs?.content ?? []).map(scored));
    }
    return pace.said(usage, finish);
  }
}

function scored(token) {
  const top = token.top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob }));
  return { text: token.token, bytes: token.bytes, logprob: token.logprob, top };
}

function turn(role, ...content) {
  const who = role === "user" ? "You" : "Model";
  return element("li", { class: `turn ${role}` }, element("p", { class: "who" }, who), ...content);
}
