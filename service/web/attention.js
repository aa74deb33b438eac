// The Attention tab: five views that explain an answer of a model.
// It requests an explanation for the selected view and options, waits, and draws the view. A new selection aborts the
// request before it. The page and the server are reached only through `ctx`.

import { onSchemeChange } from "./colours.js";
import { element, uniqueId } from "./dom.js";
import { keepFocus, addArrowKeys } from "./elements.js";
import { field, textArea } from "./form.js";
import { editableTexts, createExplainer, replaceTexts } from "./questions.js";
import { VIEWS, firstMethod, tellingView } from "./views.js";

export { drawAlignment } from "./alignment.js";
export { drawAttributions } from "./attributions.js";

const INITIAL_STATE = { view: "", kind: "self", layer: 0, head: 0, heads: [0], path: "attention_rollout", steps: 50, window: 1 };
const TICK_MS = 100;
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
 * ctx: {model, input, output, target, events(path, body, signal), showRequest(path, body)}.
 */
export function mountAttention(container, ctx) {
  const session = sessions.get(container) ?? createSession(container);
  const subject = JSON.stringify([ctx.model.id, ctx.input, ctx.output, ctx.target]);
  if (session.ctx?.model.id !== ctx.model.id) Object.assign(session, { layout: null, state: { ...session.state, method: "" } });
  if (session.subject !== subject) {
    session.subject = subject;
    explainSubject(session, ctx);
    fillTexts(session);
  }
  const problem = availableViews(ctx.model).length === 0 ? missingViewsNote(ctx.model) : "";
  container.replaceChildren(problem ? element("p", { class: "attn-note" }, problem) : session.root);
  session.start();
}

/** Sets what is explained. Without a choice of the user, the most telling view is opened. */
function explainSubject(session, ctx) {
  Object.assign(session, { ctx, explainer: createExplainer(ctx) });
  session.state.target = ctx.target ?? null;
  if (!session.hasChosen) session.state.view = tellingView(ctx);
}

/** The text boxes with the texts that are explained. Another text is explained without its answer on the other tab. */
function fillTexts(session) {
  const { ctx } = session;
  const boxes = editableTexts(ctx.input).map(({ label, text }) => [label, textArea(text, 2)]);
  const form = element("form", { class: "attn-form", "aria-label": "Text to explain" },
    ...boxes.map(([label, box]) => field(label, box)), element("button", { type: "submit", class: "quiet" }, "Explain"));
  const explain = () => {
    const input = replaceTexts(ctx.input, boxes.map(([, box]) => box.value.trim()));
    explainSubject(session, { ...ctx, input, output: "", target: ctx.model.task === "embed" ? ctx.target : null });
    session.start();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    explain();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) explain();
  });
  session.form.replaceChildren(form);
}

/** Aborts the request of the tab in `container`, if one is running. */
export function cancelAttention(container) {
  sessions.get(container)?.cancel();
}

/** Why a model has no view. */
function missingViewsNote(model) {
  if ((model.explain_decisions ?? []).length > 0) return "Answers of this model are explained in the tab Decide, where a question has a box for it.";
  return "This server explains no answers: its setting explain is false.";
}

function missingInputNote(input) {
  const hasInput = input && input.length > 0 && (typeof input === "string" || input.every(Boolean));
  return hasInput ? "" : "There is no text to explain yet.";
}

function createSession(container) {
  const session = { state: { ...INITIAL_STATE, method: "" }, ctx: null, explainer: null, layout: null, turn: new AbortController() };
  session.views = element("div");
  session.fields = element("div", { class: "attn-controls" });
  session.panel = element("div", { class: "attn-panel", id: uniqueId("attention") });
  session.form = element("div");
  session.elapsed = element("span", { class: "attn-number", "aria-hidden": "true" });
  session.share = element("span", { class: "attn-share" });
  session.waiting = element("div", { class: "attn-waiting", hidden: true }, element("span", { class: "attn-spinner", "aria-hidden": "true" }),
    element("span", { role: "status" }, "Computing …"), session.share, session.elapsed,
    element("button", { type: "button", class: "quiet small", onclick: () => session.cancel() }, "Cancel"));
  session.hasChosen = false;
  session.cancel = () => cancel(session);
  session.start = () => {
    const note = missingInputNote(session.ctx.input);
    session.turn.abort();
    session.panel.querySelector(".attn-place").replaceChildren(element("p", { class: "attn-note" }, note));
    if (!note) session.refresh();
  };
  session.refresh = () => refresh(session);
  session.open = (view, changes) => {
    Object.assign(session.state, changes, { view });
    session.hasChosen = true;
    return refresh(session).then(() => session.panel.querySelector(".attn-place [tabindex='0']")?.focus());
  };
  session.root = element("div", { class: "attn" }, session.form, session.views, session.panel);
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
  const onProgress = (share) => !signal.aborted && showProgress(session, share);
  const request = (parameters) => session.explainer.request(parameters, { signal, onProgress });
  session.panel.setAttribute("aria-busy", "true");
  showWaiting(session, signal);
  try {
    await drawView(session, { container, request, show }, signal);
  } catch (error) {
    if (signal.aborted) return;
    container.replaceChildren(element("p", { class: "attn-error", role: "alert" }, error.message));
  }
  if (signal.aborted) return;
  show();
  hideWaiting(session);
}

/** Shows how long the server has been computing, until `signal` is aborted or hideWaiting is called. */
function showWaiting(session, signal) {
  const began = performance.now();
  session.waiting.hidden = false;
  session.share.hidden = true;
  const tick = () => { session.elapsed.textContent = `${((performance.now() - began) / 1000).toFixed(1)} s`; };
  clearInterval(session.timer);
  session.timer = setInterval(tick, TICK_MS);
  signal.addEventListener("abort", () => clearInterval(session.timer), { once: true });
  tick();
}

/** Shows the share of the work that the server has done. Until it says so, and for what is computed at once, none is shown. */
function showProgress(session, share) {
  const bar = element("progress", { max: 1, value: share, "aria-label": "Share of the work done" });
  session.share.replaceChildren(bar, element("span", { class: "attn-number", "aria-hidden": "true" }, `${Math.floor(share * 100)} %`));
  session.share.hidden = false;
}

function hideWaiting(session) {
  clearInterval(session.timer);
  session.panel.removeAttribute("aria-busy");
  session.waiting.hidden = true;
}

/** Aborts the running request, which the server then stops to compute. */
function cancel(session) {
  if (!session.panel.hasAttribute("aria-busy")) return;
  session.turn.abort();
  hideWaiting(session);
  const again = element("button", { type: "button", class: "quiet", onclick: () => session.refresh() }, "Compute again");
  const note = element("p", { class: "attn-note" }, `Cancelled after ${session.elapsed.textContent}. `, again);
  session.panel.querySelector(".attn-place").replaceChildren(note);
  again.focus();
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
    if (!methods.includes(state[name])) state[name] = methods.find((method) => method === firstMethod(ctx.model)) ?? methods[0] ?? "";
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
    const onclick = () => {
      if (state.view === key) return;
      Object.assign(state, { view: key });
      session.hasChosen = true;
      session.refresh();
    };
    const data = { "data-view": key, "data-key": `view ${key}` };
    return element("button", { type: "button", ...data, ...states, onclick }, name);
  });
  const bar = element("div", { class: "attn-views", role: "toolbar", "aria-label": "Views" }, ...buttons);
  addArrowKeys(bar, buttons, 1, views.findIndex(([key]) => key === state.view));
  keepFocus(session.views, () => session.views.replaceChildren(bar));
}
