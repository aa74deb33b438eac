// Generated text with its tokens and their probabilities.
//
// The text on the page is always the text that the server sent. Tokens are shown where their texts match it, so a stop
// string, a thought or a part of a character never changes it.

import { element, percent, withProperty, uniqueId } from "./dom.js";

const decoder = new TextDecoder("utf-8", { fatal: true });

// The text of the tokens' bytes; null if they end within a character.
function decodeTokens(tokens) {
  if (tokens.some((token) => !token.bytes)) return tokens.map((token) => token.text).join("");
  try {
    return decoder.decode(new Uint8Array(tokens.flatMap((token) => token.bytes)));
  } catch {
    return null;
  }
}

export class TokenText {
  // Fills `place`; tokens are {text, bytes or null, logprob, top: [{text, logprob}]}.
  constructor(place) {
    this.text = "";
    this.placedLength = 0; // UTF-16 units of `text` that are in spans of tokens
    this.pending = []; // tokens without a span yet
    this.tip = element("div", { role: "tooltip", id: uniqueId("tip"), class: "tip", "aria-live": "off", hidden: true });
    this.tail = document.createTextNode("");
    this.spans = element("span", { class: "tokens" }, this.tail);
    place.replaceChildren(this.spans, this.tip);
    this.listen();
  }

  add(text, tokens = []) {
    this.text += text;
    this.pending.push(...tokens);
    this.placeTokens();
    this.tail.data = this.text.slice(this.placedLength);
  }

  placeTokens() {
    while (this.pending.length) {
      const { count, decodedText } = this.nextTokens();
      if (!count) return;
      const left = this.text.slice(this.placedLength);
      if (decodedText && left.startsWith(decodedText)) this.addSpan(this.pending.slice(0, count), decodedText);
      else if (decodedText.startsWith(left)) return; // the server may still send its text
      this.pending.splice(0, count);
    }
  }

  // The number of pending tokens that make up whole characters, and their text.
  nextTokens() {
    for (let count = 1; count <= Math.min(4, this.pending.length); count += 1) {
      const decodedText = decodeTokens(this.pending.slice(0, count));
      if (decodedText !== null) return { count, decodedText };
    }
    return { count: this.pending.length > 3 ? 1 : 0, decodedText: "" };
  }

  addSpan(tokens, decodedText) {
    const first = !this.spans.firstElementChild;
    const span = element("span", { class: "token", tabindex: first ? "0" : "-1" }, decodedText);
    const least = Math.min(...tokens.map((token) => token.logprob ?? 0));
    span.tokens = tokens;
    this.tail.before(withProperty(span, "--doubt", (1 - Math.exp(least)).toFixed(3)));
    this.placedLength += decodedText.length;
  }

  // The tip is shown for the token under the pointer or the focus. Escape hides it; arrow keys move between tokens.
  listen() {
    const showHovered = (event) => this.showTip(event.target.closest(".token"));
    this.spans.addEventListener("pointerover", showHovered);
    this.spans.addEventListener("focusin", showHovered);
    this.spans.addEventListener("pointerleave", () => this.showTip(null));
    this.spans.addEventListener("focusout", () => this.showTip(null));
    this.spans.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.showTip(null);
      const current = event.target.closest(".token");
      const next = { ArrowRight: current?.nextElementSibling, ArrowLeft: current?.previousElementSibling }[event.key];
      if (!next) return;
      event.preventDefault();
      current.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

  showTip(span) {
    this.tipOwner?.removeAttribute("aria-describedby");
    this.tipOwner = span;
    this.tip.hidden = !span;
    if (!span) return;
    span.setAttribute("aria-describedby", this.tip.id);
    this.tip.replaceChildren(...span.tokens.map(alternatives));
    const parentBox = this.tip.offsetParent.getBoundingClientRect();
    const box = span.getBoundingClientRect();
    const left = Math.min(box.left - parentBox.left, parentBox.width - this.tip.offsetWidth);
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${box.bottom - parentBox.top + 6}px`;
  }
}

// The most likely tokens at this position and the sampled one.
function alternatives(token) {
  const candidates = [...token.top];
  if (!candidates.some((each) => each.text === token.text)) candidates.push(token);
  candidates.sort((one, other) => other.logprob - one.logprob);
  const rows = candidates.map((each) => {
    const share = Math.exp(each.logprob);
    const bar = withProperty(element("span", { class: "meter" }), "--share", share.toFixed(4));
    return element("li", { class: each.text === token.text ? "taken" : "" },
      element("code", {}, showWhitespace(each.text)), bar, element("span", { class: "figure" }, percent(share)));
  });
  return element("ol", {}, ...rows);
}

// The text with visible spaces, line breaks and tabs.
function showWhitespace(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}
