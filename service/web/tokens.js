// Text of a generator, token by token, with how likely each was.
//
// Knows no request.  The one idea: what is shown is the text as the server sent it; tokens are laid over it as far as
// they spell it, so that a stop string, a thought or half a character never shows anything else.

import { element, percent, toned, unique } from "./dom.js";

const decoder = new TextDecoder("utf-8", { fatal: true });

// `bytes` of tokens as text; null where they end within a character.
function decoded(tokens) {
  if (tokens.some((token) => !token.bytes)) return tokens.map((token) => token.text).join("");
  try {
    return decoder.decode(new Uint8Array(tokens.flatMap((token) => token.bytes)));
  } catch {
    return null;
  }
}

export class TokenText {
  // Into `place`; tokens are {text, bytes or null, logprob, top: [{text, logprob}]}.
  constructor(place) {
    this.text = "";
    this.placed = 0; // characters that stand in tokens
    this.waiting = []; // tokens that are not placed yet
    this.tip = element("div", { role: "tooltip", id: unique("tip"), class: "tip", "aria-live": "off", hidden: true });
    this.tail = document.createTextNode("");
    this.spans = element("span", { class: "tokens" }, this.tail);
    place.replaceChildren(this.spans, this.tip);
    this.listen();
  }

  add(text, tokens = []) {
    this.text += text;
    this.waiting.push(...tokens);
    this.place();
    this.tail.data = this.text.slice(this.placed);
  }

  place() {
    while (this.waiting.length) {
      const { count, spelled } = this.next();
      if (!count) return;
      const left = this.text.slice(this.placed);
      if (spelled && left.startsWith(spelled)) this.show(this.waiting.slice(0, count), spelled);
      else if (spelled.startsWith(left)) return; // its text is held back and may still come
      this.waiting.splice(0, count);
    }
  }

  // So many tokens spell whole characters.
  next() {
    for (let count = 1; count <= Math.min(4, this.waiting.length); count += 1) {
      const spelled = decoded(this.waiting.slice(0, count));
      if (spelled !== null) return { count, spelled };
    }
    return { count: this.waiting.length > 3 ? 1 : 0, spelled: "" };
  }

  show(tokens, spelled) {
    const first = !this.spans.firstElementChild;
    const span = element("span", { class: "token", tabindex: first ? "0" : "-1" }, spelled);
    const least = Math.min(...tokens.map((token) => token.logprob ?? 0));
    span.tokens = tokens;
    this.tail.before(toned(span, "--doubt", (1 - Math.exp(least)).toFixed(3)));
    this.placed += spelled.length;
  }

  // The tip shows by pointer and by keyboard, goes with Escape, and arrows move from token to token.
  listen() {
    const over = (event) => this.tell(event.target.closest(".token"));
    this.spans.addEventListener("pointerover", over);
    this.spans.addEventListener("focusin", over);
    this.spans.addEventListener("pointerleave", () => this.tell(null));
    this.spans.addEventListener("focusout", () => this.tell(null));
    this.spans.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.tell(null);
      const here = event.target.closest(".token");
      const there = { ArrowRight: here?.nextElementSibling, ArrowLeft: here?.previousElementSibling }[event.key];
      if (!there) return;
      event.preventDefault();
      here.tabIndex = -1;
      there.tabIndex = 0;
      there.focus();
    });
  }

  tell(span) {
    this.told?.removeAttribute("aria-describedby");
    this.told = span;
    this.tip.hidden = !span;
    if (!span) return;
    span.setAttribute("aria-describedby", this.tip.id);
    this.tip.replaceChildren(...span.tokens.map(alternatives));
    const place = this.tip.offsetParent.getBoundingClientRect();
    const box = span.getBoundingClientRect();
    const left = Math.min(box.left - place.left, place.width - this.tip.offsetWidth);
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${box.bottom - place.top + 6}px`;
  }
}

// The likeliest tokens there, the drawn one among them.
function alternatives(token) {
  const known = [...token.top];
  if (!known.some((each) => each.text === token.text)) known.push(token);
  known.sort((one, other) => other.logprob - one.logprob);
  const rows = known.map((each) => {
    const share = Math.exp(each.logprob);
    const bar = toned(element("span", { class: "meter" }), "--share", share.toFixed(4));
    return element("li", { class: each.text === token.text ? "taken" : "" },
      element("code", {}, visible(each.text)), bar, element("span", { class: "figure" }, percent(share)));
  });
  return element("ol", {}, ...rows);
}

// Spaces and line breaks can be seen.
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}
