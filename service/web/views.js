// The five views of the Attention tab: the fields, the request and the drawing of each.
//
// A view is {name, methods, fields(session), draw(stage, session), needsLayout}; needsLayout: it needs the numbers of
// layers and heads. A stage is {container, request(parameters), show()}; show() shows an unfinished drawing.

import { drawAttributions } from "./attributions.js";
import { paintHead } from "./colours.js";
import { element } from "./dom.js";
import { choice, field, segments } from "./elements.js";
import { findAttention, headMatrix } from "./explanation.js";
import { emptyGrid, fillGrid } from "./headgrid.js";
import { drawMatrix } from "./heatmap.js";
import { drawHeads } from "./headview.js";
import { inputTexts } from "./questions.js";
import { missingTargetNote, targetFields } from "./targets.js";

const MAX_ANSWER_BYTES = 1_000_000; // of one answer for the grid
const WEIGHT_BYTES = (2 * 4) / 3; // float16 in base64
const PACKED_TOKENS = 48; // tokens above which numbers are requested in base64
const PATHS = { attention_rollout: "rollout", attention_flow: "flow" };
const METHODS = { integrated_gradients: "integrated gradients", gradient_x_input: "gradient × input", occlusion: "occlusion" };

export const VIEWS = {
  heads: { name: "Heads", methods: ["attention"], fields: headFields, draw: drawHeadView, needsLayout: true },
  heatmap: { name: "Heatmap", methods: ["attention"], fields: heatmapFields, draw: drawHeatmap, needsLayout: true },
  grid: { name: "All heads", methods: ["attention"], fields: kindFields, draw: drawGrid, needsLayout: true },
  paths: { name: "Rollout & flow", methods: Object.keys(PATHS), fields: pathFields, draw: drawPaths },
  attributions: { name: "Attributions", methods: Object.keys(METHODS), fields: methodFields, draw: drawScores },
};

const SCORED_TASKS = ["classify", "rank", "choose", "span", "fill"]; // whose answer has a score without a target

/** The view that is opened first: attributions of one score. Those of a generator take a pass for every token. */
export function tellingView({ model, target }) {
  const hasScore = SCORED_TASKS.includes(model.task) || (model.task !== "generate" && target);
  return hasScore && model.explain.includes("integrated_gradients") ? "attributions" : "heads";
}

/**
 * The method of attribution that is selected first. For a generator integrated gradients take many passes for every token,
 * and seldom add up, since a norm of a zero vector has no gradient.
 */
export function firstMethod({ task }) {
  return task === "generate" ? "gradient_x_input" : "integrated_gradients";
}

const count = (number) => Array.from({ length: number }, (_, index) => index);

function update(session, changes) {
  Object.assign(session.state, changes);
  session.refresh();
}

/** The numbers of layers and heads of the selected kind of attention. */
function layoutSize({ layout, state }) {
  return layout[state.kind];
}

function kindFields(session) {
  const kinds = Object.keys(session.layout);
  if (kinds.length < 2) return [];
  const options = kinds.map((kind) => [kind, kind]);
  return [segments("Attention", options, session.state.kind, (kind) => update(session, { kind }))];
}

function layerField(session) {
  const [layers] = layoutSize(session);
  const options = count(layers).map((layer) => [layer, String(layer)]);
  return choice("Layer", options, session.state.layer, (layer) => update(session, { layer: Number(layer) }));
}

function headFields(session) {
  const [layers, heads] = layoutSize(session);
  const fields = layers * heads > 1 ? [layerField(session), headToggles(session, heads)] : [];
  return [...kindFields(session), ...fields];
}

/** A button for each head, in its colour; at least one head stays selected. */
function headToggles(session, heads) {
  const selected = new Set(session.state.heads);
  const buttons = count(heads).map((head) => {
    const toggle = () => {
      const next = selected.has(head) ? [...selected].filter((other) => other !== head) : [...selected, head];
      if (next.length > 0) update(session, { heads: next.sort((one, other) => one - other) });
    };
    const attributes = { type: "button", class: "attn-head-toggle", "data-head": head, "data-key": `head ${head}` };
    const pressed = { "aria-pressed": String(selected.has(head)), "aria-label": `Head ${head}` };
    return paintHead(element("button", { ...attributes, ...pressed, onclick: toggle }, String(head)), head);
  });
  const row = { class: "attn-toggles", role: "group", "aria-label": "Heads" };
  return element("div", row, element("span", {}, "Heads"), ...buttons);
}

function heatmapFields(session) {
  const [layers, heads] = layoutSize(session);
  if (layers * heads === 1) return kindFields(session);
  const options = count(heads).map((head) => [head, String(head)]);
  const headField = choice("Head", options, session.state.head, (head) => update(session, { head: Number(head) }));
  return [...kindFields(session), layerField(session), headField];
}

const encodingOptions = ({ explainer }) => (explainer.tokens.length > PACKED_TOKENS ? { encoding: "base64" } : {});

const DECODER_NOTE = "A row has the weights at one token; the model generates the next token from them.";

const decoderNote = ({ state }) => (["cross", "decoder"].includes(state.kind) ? [element("p", { class: "attn-note" }, DECODER_NOTE)] : []);

async function drawHeadView({ container, request }, session) {
  const { kind, layer, heads } = session.state;
  const answer = await request({ method: "attention", layers: [layer], heads, ...encodingOptions(session) });
  const entry = findAttention(answer, kind);
  const viewNode = element("div");
  drawHeads(viewNode, heads.map((head) => ({ head, matrix: headMatrix(answer, entry, layer, head) })));
  container.replaceChildren(...decoderNote(session), viewNode);
}

async function drawHeatmap({ container, request }, session) {
  const { kind, layer, head } = session.state;
  const answer = await request({ method: "attention", layers: [layer], heads: [head], ...encodingOptions(session) });
  const label = `Attention of layer ${layer}, head ${head}: rows attend to columns`;
  const viewNode = element("div");
  drawMatrix(viewNode, headMatrix(answer, findAttention(answer, kind), layer, head), { label, verb: "attends to" });
  container.replaceChildren(...decoderNote(session), viewNode);
}

/** The layers per request that fit into MAX_ANSWER_BYTES; one while the number of tokens is not known. */
function layersPerRequest({ explainer }, heads) {
  const bytes = heads * explainer.tokens.length ** 2 * WEIGHT_BYTES;
  return bytes === 0 ? 1 : Math.max(1, Math.floor(MAX_ANSWER_BYTES / bytes));
}

async function drawGrid({ container, request, show }, session) {
  const [layers, heads] = layoutSize(session);
  const grid = emptyGrid(layers, heads, (layer, head) => session.open("heatmap", { layer, head }));
  const progress = element("progress", { max: layers, value: 0, "aria-label": "Layers drawn" });
  container.replaceChildren(progress, grid.node);
  show();
  for (let layer = 0; layer < layers; layer = progress.value) {
    const batch = count(layers).slice(layer, layer + layersPerRequest(session, heads));
    const selection = batch.length < layers ? { layers: batch } : {};
    const answer = await request({ method: "attention", ...selection, dtype: "float16", encoding: "base64" });
    fillGrid(grid, answer, findAttention(answer, session.state.kind));
    progress.value = layer + batch.length;
    await new Promise(requestAnimationFrame);
  }
  progress.remove();
}

function availableMethods({ ctx }, names) {
  return Object.entries(names).filter(([method]) => ctx.model.explain.includes(method));
}

function pathFields(session) {
  const methodField = segments("Method", availableMethods(session, PATHS), session.state.path, (path) => update(session, { path }));
  return [methodField, ...targetFields(session)];
}

async function drawPaths({ container, request }, session) {
  const { path, target } = session.state;
  const answer = await request({ method: path, ...(target ? { target } : {}) });
  const [entry] = answer.attention;
  const scores = element("div");
  const matrixNode = element("div");
  drawAttributions(scores, answer, inputTexts(session.ctx.input));
  const words = { label: `${PATHS[path]}: the contribution of each column to each row`, verb: "depends on" };
  drawMatrix(matrixNode, headMatrix(answer, entry, entry.layers[0], entry.heads[0]), words);
  container.replaceChildren(scores, element("h4", {}, "All tokens"), matrixNode);
}

function methodFields(session) {
  const { state } = session;
  const fields = [segments("Method", availableMethods(session, METHODS), state.method, (method) => update(session, { method }))];
  const number = (label, name, max) => {
    const attributes = { type: "number", min: 1, max, value: state[name] };
    return field(label, attributes, (value) => update(session, { [name]: Math.min(Math.max(Number(value), 1), max) }));
  };
  if (state.method === "integrated_gradients") fields.push(number("Steps", "steps", 1000));
  if (state.method === "occlusion") fields.push(number("Tokens removed together", "window", 32));
  return [...fields, ...targetFields(session)];
}

async function drawScores({ container, request }, session) {
  const { method, target, steps, window } = session.state;
  const problem = missingTargetNote(session);
  if (problem) {
    container.replaceChildren(element("p", { class: "attn-note" }, problem));
    return;
  }
  const options = { integrated_gradients: { steps }, occlusion: { window } };
  const answer = await request({ method, ...options[method], ...(target ? { target } : {}) });
  drawAttributions(container, answer, inputTexts(session.ctx.input));
}
