// Keyboard shortcuts, and the dialog that lists them.
//
// All have the Alt key, so none is in the way of text, of a screen reader or of speech input.

import { element } from "./dom.js";

const LISTED = [
  ["Alt + K", "this list"], ["Alt + 1, 2, 3, 4", "the views Try, Decide, Attention, Server"], ["Alt + M", "the model"], ["Alt + I", "the input"],
  ["Alt + N", "a new conversation"], ["Enter", "send a message; Shift + Enter: a new line"], ["Ctrl + Enter", "submit a form"],
  ["Escape", "stop the answer, cancel an explanation, hide a token's details"], ["Arrow keys", "move between tabs, tokens, cells"],
];

// `actions` has a function for each key: {KeyK: open, Digit1: ...}, and one for Escape.
export function connectShortcuts(button, actions) {
  const rows = LISTED.flatMap(([keys, meaning]) => [element("dt", {}, element("kbd", {}, keys)), element("dd", {}, meaning)]);
  const close = element("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
  const dialog = element("dialog", { "aria-labelledby": "shortcuts-title" }, element("h2", { id: "shortcuts-title" }, "Keyboard"),
    element("dl", { class: "keys" }, ...rows), close);
  document.body.append(dialog);
  const open = () => dialog.open || dialog.showModal();
  button.addEventListener("click", open);
  const all = { KeyK: open, ...actions };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !dialog.open && !event.defaultPrevented) actions.Escape();
    if (!event.altKey || event.ctrlKey || event.metaKey || !Object.hasOwn(all, event.code)) return;
    event.preventDefault();
    all[event.code]();
  });
}
