// The form for a generator with a chat template.
//
// Each request has the whole conversation that is on the screen. Answers are drawn as markdown, or token by token with
// their probabilities.

import * as conversations from "./conversations.js";
import { element, withProperty } from "./dom.js";
import { textArea, field } from "./form.js";
import { samplingFields, GenerationTimer } from "./generation.js";
import { copyButton, MarkdownText } from "./markdown.js";
import { CHATS } from "./samples.js";
import { followEnd } from "./scroll.js";
import { TokenText } from "./tokens.js";

const PATH = "/v1/chat/completions";
const NARROW = "(max-width: 46rem)"; // as in style.css
const PADDING_PX = 24; // of the panel, as in style.css

export function mountChat(container, page) {
  const chat = new Chat(page);
  container.replaceChildren(chat.node);
  const above = container.parentElement.firstElementChild.getBoundingClientRect().bottom + window.scrollY;
  withProperty(chat.node, "--top", `${Math.round(above) + PADDING_PX}px`);
  chat.open(conversations.readCurrent());
  return chat;
}

class Chat {
  constructor(page) {
    this.page = page;
    this.conversation = conversations.newConversation();
    this.controller = null;
    this.system = textArea("", 2);
    this.sampling = samplingFields(page.model);
    this.message = textArea("", 2);
    this.message.setAttribute("enterkeyhint", "send");
    this.message.placeholder = `Message to ${page.model.id}`;
    this.list = new conversations.ConversationList({
      onOpen: (each) => this.open(each), onNew: () => this.clear(), onRename: (title) => this.rename(title),
    });
    this.talk = element("ol", { class: "talk", "aria-label": "Conversation", "aria-live": "polite" });
    this.error = element("p", { class: "error", role: "alert" });
    this.sendButton = element("button", { type: "submit" }, "Send");
    this.stopButton = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.abort() }, "Stop");
    this.regenerateButton = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.regenerate() }, "Regenerate");
    this.newButton = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.clear() }, "New conversation");
    this.suggestions = element("div", { class: "row suggestions", role: "group", "aria-label": "Examples" }, ...CHATS.map((words) =>
      element("button", { type: "button", class: "quiet", onclick: () => this.sendMessage(words) }, words)));
    this.node = element("div", { class: "chat" }, this.sidePanel(), this.mainPanel());
    this.node.addEventListener("input", () => this.preview());
    this.refuseFiles();
  }

  // On a narrow screen both parts are folded.
  sidePanel() {
    const open = !matchMedia(NARROW).matches;
    const part = (name, ...content) => element("details", { open }, element("summary", {}, name), ...content);
    return element("div", { class: "side" }, part("Conversations", this.list.node),
      part("Settings", element("div", { class: "ask" }, field("System prompt", this.system), this.sampling.node)));
  }

  mainPanel() {
    const scroller = element("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Messages" }, this.talk, this.suggestions);
    const down = element("button", { type: "button", class: "quiet down", hidden: true }, "↓ Latest");
    this.follow = followEnd(scroller, down);
    const label = field("Message", this.message);
    label.firstChild.className = "hidden";
    const form = element("form", { class: "composer", "aria-label": "New message" }, this.error, label,
      element("div", { class: "row" }, this.sendButton, this.stopButton, this.regenerateButton, this.newButton));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendMessage(this.message.value.trim());
    });
    sendOnEnter(this.message, () => form.requestSubmit());
    return element("div", { class: "talking" }, scroller, down, form);
  }

  // Images and files that are pasted or dropped are refused in words.
  refuseFiles() {
    const refuse = (event) => {
      const [file] = (event.clipboardData ?? event.dataTransfer).files;
      if (!file) return;
      event.preventDefault();
      const reads = file.type.startsWith("image/") ? "reads text, no images" : "reads text, no files: paste what is in it";
      this.error.textContent = `${file.name} is not sent: ${this.page.model.id} ${reads}.`;
    };
    this.node.addEventListener("paste", refuse);
    this.node.addEventListener("drop", refuse);
    this.node.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
  }

  get turns() {
    return this.conversation.turns;
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

  open(conversation) {
    this.abort();
    this.conversation = structuredClone(conversation);
    conversations.storeCurrent(conversation);
    this.system.value = conversation.system;
    this.error.textContent = "";
    this.talk.replaceChildren();
    for (const turn of this.turns) this.drawTurn(turn);
    this.showState(false);
    this.list.show(conversation.id);
    this.follow.fromNowOn();
    this.preview();
    this.page.onChange();
  }

  clear() {
    this.open(conversations.newConversation());
    this.message.focus();
  }

  rename(title) {
    this.conversation.title = title;
    this.keep();
  }

  keep() {
    this.conversation.title ||= conversations.titleOf(this.turns[0].content);
    this.conversation.system = this.system.value.trim();
    const problem = conversations.keep(this.conversation);
    if (problem) this.error.textContent = problem;
    this.list.show(this.conversation.id);
  }

  drawTurn(turn) {
    const said = element("div", { class: "said" });
    const actions = element("div", { class: "row actions" }, copyButton(() => turn.content));
    const item = element("li", { class: `turn ${turn.role}` }, element("div", { class: "who" }, turn.role), said, actions);
    if (turn.role === "user") {
      said.textContent = turn.content;
      actions.append(element("button", { type: "button", class: "quiet small", onclick: () => this.edit(turn, item) }, "Edit"));
    } else {
      new Answer(said, actions).add(turn.content);
    }
    this.talk.append(item);
    return item;
  }

  // The message in a field. Sending it again drops what follows it.
  edit(turn, item) {
    if (this.controller) return;
    const text = textArea(turn.content, 3);
    text.setAttribute("aria-label", "Edited message");
    const cancel = () => {
      item.replaceWith(shown);
      shown.querySelector(".actions button:last-child").focus();
    };
    const send = () => {
      const words = text.value.trim();
      if (!words || this.controller) return;
      this.turns.splice(this.turns.indexOf(turn));
      while (form.nextSibling) form.nextSibling.remove();
      form.remove();
      this.sendMessage(words);
    };
    const form = element("li", { class: "turn user" }, text, element("div", { class: "row" },
      element("button", { type: "button", onclick: send }, "Send again"),
      element("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel")));
    const shown = item;
    sendOnEnter(text, send);
    text.addEventListener("keydown", (event) => event.key === "Escape" && cancel());
    shown.replaceWith(form);
    text.focus();
  }

  sendMessage(words) {
    if (!words || this.controller) return;
    const turn = { role: "user", content: words };
    this.turns.push(turn);
    this.drawTurn(turn);
    this.message.value = "";
    this.answer();
  }

  regenerate() {
    if (this.controller) return;
    if (this.turns.at(-1)?.role === "assistant") {
      this.turns.pop();
      this.talk.lastElementChild.remove();
    }
    this.answer();
  }

  abort() {
    this.controller?.abort();
  }

  showState(busy) {
    this.stopButton.hidden = !busy;
    this.sendButton.disabled = busy;
    this.regenerateButton.hidden = this.newButton.hidden = busy || !this.turns.length;
    this.suggestions.hidden = this.turns.length > 0;
    this.talk.setAttribute("aria-busy", String(busy));
  }

  async answer() {
    const { conversation } = this;
    const turn = { role: "assistant", content: "" };
    const item = this.drawTurn(turn);
    const [said, actions] = [item.querySelector(".said"), item.querySelector(".actions")];
    const note = element("p", { class: "hint note" });
    const answer = new Answer(said, actions, this.sampling.wantsLogprobs());
    const controller = (this.controller = new AbortController());
    const timer = new GenerationTimer();
    actions.before(note);
    actions.hidden = true;
    this.error.textContent = "";
    this.showState(true);
    this.keep();
    this.follow.fromNowOn();
    this.page.showRequest(PATH, this.body(this.turns));
    const add = (words, tokens) => {
      turn.content += words;
      answer.add(words, tokens);
      this.follow();
    };
    try {
      note.textContent = await this.readAnswer(add, timer, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") note.textContent = timer.summarize(null, "stopped");
      else this.error.textContent = error.message;
    }
    this.controller = null;
    if (conversation !== this.conversation) return; // another one was opened meanwhile
    if (turn.content) this.turns.push(turn);
    else item.remove();
    actions.hidden = false;
    this.showState(false);
    this.keep();
    this.follow();
    this.page.onChange();
  }

  async readAnswer(add, timer, signal) {
    let usage = null;
    let finish = "";
    for await (const event of this.page.events(PATH, this.body(this.turns), signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const words = choice.delta.content ?? "";
      if (words) timer.recordToken();
      finish = choice.finish_reason ?? finish;
      add(words, (choice.logprobs?.content ?? []).map(readToken));
    }
    return timer.summarize(usage, finish);
  }
}

// The text of an answer as markdown. With `hasTokens` its tokens are shown first, and a button changes between both.
class Answer {
  constructor(place, actions, hasTokens = false) {
    this.text = "";
    const markdown = element("div", { class: "markdown", hidden: hasTokens });
    const tokens = element("div", { class: "spans", hidden: !hasTokens });
    place.replaceChildren(markdown, tokens);
    this.markdown = new MarkdownText(markdown);
    this.tokenText = hasTokens ? new TokenText(tokens) : null;
    if (!hasTokens) return;
    const button = element("button", { type: "button", class: "quiet small" }, "As markdown");
    button.addEventListener("click", () => {
      [markdown.hidden, tokens.hidden] = [tokens.hidden, markdown.hidden];
      button.textContent = tokens.hidden ? "As tokens" : "As markdown";
    });
    actions.append(button);
  }

  add(words, tokens = []) {
    this.text += words;
    this.markdown.show(this.text);
    this.tokenText?.add(words, tokens);
  }
}

function sendOnEnter(control, send) {
  control.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
}

function readToken(token) {
  const top = token.top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob }));
  return { text: token.token, bytes: token.bytes, logprob: token.logprob, top };
}
