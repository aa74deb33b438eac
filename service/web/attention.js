// The Attention tab: five ways to look at why a model answered what it did.
// Knows neither the page around it nor the server: both are what `ctx` gives.  It turns what is picked into questions,
// waits, and has the view draw; an answer that nobody waits for any more is dropped.

import { onScheme } from "./colours.js";
import { element, unique } from "./dom.js";
import { keepingFocus, walked } from "./elements.js";
import { questions } from "./questions.js";
import { VIEWS } from "./views.js";

export { drawAlignment } from "./alignment.js";
export { drawAttributions } from "./attributions.js";

const START = { view: "heads", kind: "self", layer: 0, head: 0, heads: [0], path: "attention_rollout", steps: 50, window: 1 };
const sessions = new WeakMap(); // container -> session

await Promise.all(["attention.css", "weights.css", "attributions.css"].map(styled));

/** A style sheet, unless the page has it already. */
function styled(name) {
  const { href } = new URL(name, import.meta.url);
  if ([...document.styleSheets].some((sheet) => sheet.href === href)) return Promise.resolve();
  return new Promise((done) => {
    document.head.append(element("link", { rel: "stylesheet", href, onload: done, onerror: done }));
  });
}

/**
 * Shows the tab in `container`.  Called again when what is on the screen has changed: what was picked stays.
 *
 * ctx: {model, input, output, target, request(path, body, {signal}), copyable(path, body)}.
 */
export function mountAttention(container, ctx) {
  const session = sessions.get(container) ?? opened(container);
  const subject = JSON.stringify([ctx.model.id, ctx.input, ctx.output, ctx.target]);
  if (session.ctx?.model.id !== ctx.model.id) session.layout = null;
  if (session.subject !== subject) {
    Object.assign(session, { subject, about: questions(ctx) });
    session.state.target = ctx.target ?? null;
  }
  session.ctx = ctx;
  const lacking = viewsOf(ctx.model).length === 0 ? "This server explains no answers: its setting explain is off." : absent(ctx.input);
  container.replaceChildren(lacking ? element("p", { class: "attn-note" }, lacking) : session.root);
  if (lacking) session.turn.abort();
  else session.refresh();
}

function absent(input) {
  const given = input && input.length > 0 && (typeof input === "string" || input.every(Boolean));
  return given ? "" : "There is nothing to explain yet: ask the model something first.";
}

function opened(container) {
  const session = { state: { ...START, method: "" }, ctx: null, about: null, layout: null, turn: new AbortController() };
  session.views = element("div");
  session.fields = element("div", { class: "attn-controls" });
  session.panel = element("div", { class: "attn-panel", id: unique("attention") });
  session.waiting = element("p", { class: "attn-waiting", role: "status" });
  session.refresh = () => refresh(session);
  session.open = (view, changes) => {
    Object.assign(session.state, changes, { view });
    return refresh(session).then(() => session.panel.querySelector(".attn-place [tabindex='0']")?.focus());
  };
  session.root = element("div", { class: "attn" }, session.views, session.panel);
  session.panel.append(session.fields, session.waiting, element("div", { class: "attn-place" }));
  sessions.set(container, session);
  onScheme(() => {
    if (session.root.isConnected) refresh(session);
  });
  return session;
}

/** Draws what is picked now; what was asked before is no longer waited for. */
async function refresh(session) {
  session.turn.abort();
  session.turn = new AbortController();
  const { signal } = session.turn;
  settle(session);
  fillViews(session);
  const place = element("div", { class: "attn-place" });
  const show = () => session.panel.querySelector(".attn-place").replaceWith(place);
  const ask = (question) => session.about.ask(question, signal);
  session.panel.setAttribute("aria-busy", "true");
  session.waiting.replaceChildren("Asking the server …");
  try {
    await shown(session, { place, ask, show }, signal);
  } catch (error) {
    if (signal.aborted) return;
    place.replaceChildren(element("p", { class: "attn-error", role: "alert" }, error.message));
  }
  if (signal.aborted) return;
  show();
  session.panel.removeAttribute("aria-busy");
  session.waiting.replaceChildren();
}

async function shown(session, stage, signal) {
  const view = VIEWS[session.state.view];
  if (view.looks) {
    session.layout ??= await session.about.layout(signal);
    withinLayout(session);
  }
  const known = session.about.tokens.length;
  fillFields(session, view);
  await view.draw(stage, session);
  signal.throwIfAborted();
  if (known !== session.about.tokens.length) fillFields(session, view);
}

function fillFields(session, view) {
  keepingFocus(session.fields, () => session.fields.replaceChildren(...view.fields(session)));
}

/** Views and methods that this model has, in the place of those it has not. */
function settle({ state, ctx }) {
  const has = (methods) => methods.filter((method) => ctx.model.explain.includes(method));
  const views = viewsOf(ctx.model).map(([key]) => key);
  if (!views.includes(state.view)) state.view = views[0];
  for (const [name, view] of [["path", "paths"], ["method", "attributions"]]) {
    const methods = has(VIEWS[view].methods);
    if (!methods.includes(state[name])) state[name] = methods[0] ?? "";
  }
}

/** [key, view] of those for which the server has a method. */
function viewsOf(model) {
  return Object.entries(VIEWS).filter(([, view]) => view.methods.some((method) => model.explain.includes(method)));
}

function withinLayout({ state, layout }) {
  const kinds = Object.keys(layout);
  if (!kinds.includes(state.kind)) state.kind = kinds.includes("cross") ? "cross" : kinds[0];
  const [layers, heads] = layout[state.kind];
  state.layer = Math.min(state.layer, layers - 1);
  state.head = Math.min(state.head, heads - 1);
  state.heads = state.heads.filter((head) => head < heads);
  if (state.heads.length === 0) state.heads = [0];
}

function fillViews(session) {
  const { state, ctx } = session;
  const views = viewsOf(ctx.model);
  const buttons = views.map(([key, { name }]) => {
    const pressed = { "aria-pressed": String(key === state.view), "aria-controls": session.panel.id };
    const onclick = () => state.view !== key && Object.assign(state, { view: key }) && session.refresh();
    const data = { "data-view": key, "data-key": `view ${key}` };
    return element("button", { type: "button", ...data, ...pressed, onclick }, name);
  });
  const bar = element("div", { class: "attn-views", role: "toolbar", "aria-label": "Views" }, ...buttons);
  walked(bar, buttons, 1, views.findIndex(([key]) => key === state.view));
  keepingFocus(session.views, () => session.views.replaceChildren(bar));
}
