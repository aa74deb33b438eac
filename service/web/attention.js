// The Attention tab: five views that explain an answer of a model.
// It requests an explanation for the selected view and options, waits, and draws the view. A new selection aborts the
// request before it. The page and the server are reached only through `ctx`.

import { onSchemeChange } from "./colours.js";
import { element, uniqueId } from "./dom.js";
import { keepFocus, addArrowKeys } from "./elements.js";
import { createExplainer } from "./questions.js";
import { VIEWS } from "./views.js";

export { drawAlignment } from "./alignment.js";
export { drawAttributions } from "./attributions.js";

const INITIAL_STATE = { view: "heads", kind: "self", layer: 0, head: 0, heads: [0], path: "attention_rollout", steps: 50, window: 1 };
const sessions = new WeakMap(); // container -> session

await Promise.all(["attention.css", "weights.css", "attributions.css"].map(loadStyles));

/** Loads a style sheet, unless the page has it already. */
function loadStyles(name) {
  const { href } = new URL(name, import.meta.url);
  if ([...document.styleSheets].some((sheet) => sheet.href === href)) return Promise.resolve();
  return new Promise((done) => {
    document.head.append(element("link", { rel: "stylesheet", href, onload: done, onerror: done }));
  });
}

/**
 * Shows the tab in `container`. It is called again when the form or the answer has changed; the selection stays.
 *
 * ctx: {model, input, output, target, request(path, body, {signal}), showRequest(path, body)}.
 */
export function mountAttention(container, ctx) {
  const session = sessions.get(container) ?? createSession(container);
  const subject = JSON.stringify([ctx.model.id, ctx.input, ctx.output, ctx.target]);
  if (session.ctx?.model.id !== ctx.model.id) session.layout = null;
  if (session.subject !== subject) {
    Object.assign(session, { subject, explainer: createExplainer(ctx) });
    session.state.target = ctx.target ?? null;
  }
  session.ctx = ctx;
  const problem = availableViews(ctx.model).length === 0 ? "This server explains no answers: its setting explain is false." : missingInputNote(ctx.input);
  container.replaceChildren(problem ? element("p", { class: "attn-note" }, problem) : session.root);
  if (problem) session.turn.abort();
  else session.refresh();
}

/** Aborts the request of the tab in `container`, if one is running. */
export function cancelAttention(container) {
  sessions.get(container)?.turn.abort();
}

function missingInputNote(input) {
  const hasInput = input && input.length > 0 && (typeof input === "string" || input.every(Boolean));
  return hasInput ? "" : "There is no input to explain yet: send the model a request first.";
}

function createSession(container) {
  const session = { state: { ...INITIAL_STATE, method: "" }, ctx: null, explainer: null, layout: null, turn: new AbortController() };
  session.views = element("div");
  session.fields = element("div", { class: "attn-controls" });
  session.panel = element("div", { class: "attn-panel", id: uniqueId("attention") });
  session.waiting = element("p", { class: "attn-waiting", role: "status" });
  session.refresh = () => refresh(session);
  session.open = (view, changes) => {
    Object.assign(session.state, changes, { view });
    return refresh(session).then(() => session.panel.querySelector(".attn-place [tabindex='0']")?.focus());
  };
  session.root = element("div", { class: "attn" }, session.views, session.panel);
  session.panel.append(session.fields, session.waiting, element("div", { class: "attn-place" }));
  sessions.set(container, session);
  onSchemeChange(() => {
    if (session.root.isConnected) refresh(session);
  });
  return session;
}

/** Draws the current selection, and aborts the request of the one before. */
async function refresh(session) {
  session.turn.abort();
  session.turn = new AbortController();
  const { signal } = session.turn;
  chooseAvailable(session);
  fillViews(session);
  const container = element("div", { class: "attn-place" });
  const show = () => session.panel.querySelector(".attn-place").replaceWith(container);
  const request = (parameters) => session.explainer.request(parameters, signal);
  session.panel.setAttribute("aria-busy", "true");
  session.waiting.replaceChildren("Waiting for the server …");
  try {
    await drawView(session, { container, request, show }, signal);
  } catch (error) {
    if (signal.aborted) return;
    container.replaceChildren(element("p", { class: "attn-error", role: "alert" }, error.message));
  }
  if (signal.aborted) return;
  show();
  session.panel.removeAttribute("aria-busy");
  session.waiting.replaceChildren();
}

async function drawView(session, stage, signal) {
  const view = VIEWS[session.state.view];
  if (view.needsLayout) {
    session.layout ??= await session.explainer.layout(signal);
    clampToLayout(session);
  }
  const count = session.explainer.tokens.length;
  fillFields(session, view);
  await view.draw(stage, session);
  signal.throwIfAborted();
  if (count !== session.explainer.tokens.length) fillFields(session, view);
}

function fillFields(session, view) {
  keepFocus(session.fields, () => session.fields.replaceChildren(...view.fields(session)));
}

/** Replaces a selected view or method that the model does not support by one that it supports. */
function chooseAvailable({ state, ctx }) {
  const available = (methods) => methods.filter((method) => ctx.model.explain.includes(method));
  const views = availableViews(ctx.model).map(([key]) => key);
  if (!views.includes(state.view)) state.view = views[0];
  for (const [name, view] of [["path", "paths"], ["method", "attributions"]]) {
    const methods = available(VIEWS[view].methods);
    if (!methods.includes(state[name])) state[name] = methods[0] ?? "";
  }
}

/** [key, view] of the views for which the model supports a method. */
function availableViews(model) {
  return Object.entries(VIEWS).filter(([, view]) => view.methods.some((method) => model.explain.includes(method)));
}

function clampToLayout({ state, layout }) {
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
  const views = availableViews(ctx.model);
  const buttons = views.map(([key, { name }]) => {
    const states = { "aria-pressed": String(key === state.view), "aria-controls": session.panel.id };
    const onclick = () => state.view !== key && Object.assign(state, { view: key }) && session.refresh();
    const data = { "data-view": key, "data-key": `view ${key}` };
    return element("button", { type: "button", ...data, ...states, onclick }, name);
  });
  const bar = element("div", { class: "attn-views", role: "toolbar", "aria-label": "Views" }, ...buttons);
  addArrowKeys(bar, buttons, 1, views.findIndex(([key]) => key === state.view));
  keepFocus(session.views, () => session.views.replaceChildren(bar));
}
