// The conversations of a browser, and their list.
//
// They are kept in the storage of this origin. The server keeps none of them.

import { element } from "./dom.js";

const STORAGE_KEY = "polyhead-conversations";
const CURRENT_KEY = "polyhead-conversation"; // of this tab
const MAX_CONVERSATIONS = 200;
const TITLE_LENGTH = 48; // characters

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", system: "", turns: [], changed: 0 };
}

// The beginning of the first message.
export function titleOf(text) {
  const line = text.trim().replaceAll(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

// {id, title, system, turns: [{role, content}], changed} of each conversation, the newest first.
export function readAll() {
  try {
    const read = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "[]");
    return Array.isArray(read) ? read.filter((each) => each?.id && Array.isArray(each.turns)) : [];
  } catch {
    return [];
  }
}

// Returns a sentence if the conversation could not be kept, else "".
function writeAll(conversations) {
  try {
    localStorage.setItem(STORAGE_KEY, JSON.stringify(conversations.slice(0, MAX_CONVERSATIONS)));
    return "";
  } catch (error) {
    if (error.name !== "QuotaExceededError" && error.name !== "SecurityError") throw error;
    return "The browser has no room for this conversation: it is lost when the page is closed. Delete older ones.";
  }
}

export function keep(conversation) {
  conversation.changed = Date.now();
  return writeAll([conversation, ...readAll().filter(({ id }) => id !== conversation.id)]);
}

export function remove(id) {
  return writeAll(readAll().filter((each) => each.id !== id));
}

// The conversation that was open in this tab, or a new one.
export function readCurrent() {
  return readAll().find(({ id }) => id === sessionStorage.getItem(CURRENT_KEY)) ?? newConversation();
}

export function storeCurrent({ id }) {
  sessionStorage.setItem(CURRENT_KEY, id);
}

// A file with the conversation as the messages of a request.
function download({ title, system, turns }) {
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
  const file = new Blob([JSON.stringify({ title, messages }, null, 2)], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(file), download: `${title.replaceAll(/[^\p{L}\p{N}]+/gu, "-") || "conversation"}.json` });
  link.click();
  URL.revokeObjectURL(link.href);
}

// The list. `onOpen(conversation)` is called for the selected one, `onNew()` if the open one was deleted.
export class ConversationList {
  constructor({ onOpen, onNew, onRename }) {
    Object.assign(this, { onOpen, onNew, onRename, current: "" });
    this.list = element("ul", { class: "conversations" });
    this.status = element("div", { class: "row hint", role: "status" });
    this.node = element("div", {}, this.list, this.status);
  }

  show(current = this.current) {
    this.current = current;
    const all = readAll();
    this.list.replaceChildren(...all.map((each) => this.row(each)));
    if (!all.length) this.list.replaceChildren(element("li", { class: "hint" }, "None is kept yet."));
  }

  row(conversation) {
    const isCurrent = conversation.id === this.current;
    const open = element("button", {
      type: "button", class: "quiet title", "aria-current": isCurrent ? "true" : null, onclick: () => this.onOpen(conversation),
    }, conversation.title);
    const action = (name, onclick) =>
      element("button", { type: "button", class: "quiet small", "aria-label": `${name}: ${conversation.title}`, onclick }, name);
    const row = element("li", {}, open);
    if (isCurrent) {
      row.append(element("div", { class: "row" }, action("Rename", () => this.rename(row, conversation)),
        action("Export", () => download(conversation)), action("Delete", () => this.delete(conversation))));
    }
    return row;
  }

  rename(row, conversation) {
    const title = element("input", { type: "text", "aria-label": "Title", value: conversation.title, maxlength: 200 });
    const done = (isKept) => {
      if (isKept && title.value.trim()) this.onRename(title.value.trim());
      else this.show();
      this.list.querySelector("[aria-current]")?.focus();
    };
    title.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") done(event.key === "Enter");
    });
    row.replaceChildren(title);
    title.select();
  }

  delete(conversation) {
    remove(conversation.id);
    const undo = element("button", { type: "button", class: "quiet small" }, "Undo");
    undo.addEventListener("click", () => {
      this.status.replaceChildren();
      keep(conversation);
      this.onOpen(conversation);
    });
    this.status.replaceChildren("Deleted.", undo);
    this.onNew();
  }
}
