// The five views of the Attention tab: which fields each has, what it asks for, and what draws the answer.
// Knows neither the page around the tab nor how an answer is waited for.
//
// A view is {name, methods, fields(session), draw(stage, session), looks}: looks if it has to know how many layers and
// heads there are; a stage is {place, ask, show}: where to draw, how to ask, and what shows an unfinished drawing.

import { drawAttributions } from "./attributions.js";
import { paintHead } from "./colours.js";
import { element } from "./dom.js";
import { choice, field, segments } from "./elements.js";
import { attentionOf, matrixOf } from "./explanation.js";
import { emptyGrid, fillGrid } from "./headgrid.js";
import { drawMatrix } from "./heatmap.js";
import { drawHeads } from "./headview.js";
import { textsOf } from "./questions.js";
import { missing, targetFields } from "./targets.js";

const GRID_BYTES = 1_000_000; // of one answer on the way to the grid
const BYTES_OF_WEIGHT = (2 * 4) / 3; // float16 in base64
const MANY_TOKENS = 48; // from here on numbers travel packed
const PATHS = { attention_rollout: "rollout", attention_flow: "flow" };
const METHODS = { gradient_x_input: "gradient × input", integrated_gradients: "integrated gradients", occlusion: "occlusion" };

export const VIEWS = {
  heads: { name: "Heads", methods: ["attention"], fields: headFields, draw: drawHeadView, looks: true },
  heatmap: { name: "Heatmap", methods: ["attention"], fields: heatmapFields, draw: drawHeatmap, looks: true },
  grid: { name: "All heads", methods: ["attention"], fields: kindFields, draw: drawGrid, looks: true },
  paths: { name: "Rollout & flow", methods: Object.keys(PATHS), fields: pathFields, draw: drawPaths },
  attributions: { name: "Attributions", methods: Object.keys(METHODS), fields: methodFields, draw: drawScores },
};

const count = (number) => Array.from({ length: number }, (_, index) => index);

function set(session, changes) {
  Object.assign(session.state, changes);
  session.refresh();
}

/** How many layers and heads attention of the chosen kind has. */
function sizes({ layout, state }) {
  return layout[state.kind];
}

function kindFields(session) {
  const kinds = Object.keys(session.layout);
  if (kinds.length < 2) return [];
  const options = kinds.map((kind) => [kind, kind]);
  return [segments("Attention", options, session.state.kind, (kind) => set(session, { kind }))];
}

function layerField(session) {
  const [layers] = sizes(session);
  const options = count(layers).map((layer) => [layer, String(layer)]);
  return choice("Layer", options, session.state.layer, (layer) => set(session, { layer: Number(layer) }));
}

function headFields(session) {
  const [layers, heads] = sizes(session);
  const several = layers * heads > 1 ? [layerField(session), headToggles(session, heads)] : [];
  return [...kindFields(session), ...several];
}

/** A button for each head, in its colour; one head stays chosen. */
function headToggles(session, heads) {
  const chosen = new Set(session.state.heads);
  const buttons = count(heads).map((head) => {
    const pick = () => {
      const next = chosen.has(head) ? [...chosen].filter((other) => other !== head) : [...chosen, head];
      if (next.length > 0) set(session, { heads: next.sort((one, other) => one - other) });
    };
    const attributes = { type: "button", class: "attn-head-toggle", "data-head": head, "data-key": `head ${head}` };
    const pressed = { "aria-pressed": String(chosen.has(head)), "aria-label": `Head ${head}` };
    return paintHead(element("button", { ...attributes, ...pressed, onclick: pick }, String(head)), head);
  });
  const row = { class: "attn-toggles", role: "group", "aria-label": "Heads" };
  return element("div", row, element("span", {}, "Heads"), ...buttons);
}

function heatmapFields(session) {
  const [layers, heads] = sizes(session);
  if (layers * heads === 1) return kindFields(session);
  const options = count(heads).map((head) => [head, String(head)]);
  const pick = choice("Head", options, session.state.head, (head) => set(session, { head: Number(head) }));
  return [...kindFields(session), layerField(session), pick];
}

const packing = ({ about }) => (about.tokens.length > MANY_TOKENS ? { encoding: "base64" } : {});

const READ = "A row is the place of a token that was written; what the network looks at there, it writes the next token from.";

const note = ({ state }) => (["cross", "decoder"].includes(state.kind) ? [element("p", { class: "attn-note" }, READ)] : []);

async function drawHeadView({ place, ask }, session) {
  const { kind, layer, heads } = session.state;
  const answer = await ask({ method: "attention", layers: [layer], heads, ...packing(session) });
  const entry = attentionOf(answer, kind);
  const drawn = element("div");
  drawHeads(drawn, heads.map((head) => ({ head, matrix: matrixOf(answer, entry, layer, head) })));
  place.replaceChildren(...note(session), drawn);
}

async function drawHeatmap({ place, ask }, session) {
  const { kind, layer, head } = session.state;
  const answer = await ask({ method: "attention", layers: [layer], heads: [head], ...packing(session) });
  const label = `Attention of layer ${layer}, head ${head}: rows look at columns`;
  const drawn = element("div");
  drawMatrix(drawn, matrixOf(answer, attentionOf(answer, kind), layer, head), { label, verb: "looks at" });
  place.replaceChildren(...note(session), drawn);
}

/** As many layers an answer as fit into GRID_BYTES, one as long as the number of tokens is not known. */
function layersAtOnce({ about }, heads) {
  const bytes = heads * about.tokens.length ** 2 * BYTES_OF_WEIGHT;
  return bytes === 0 ? 1 : Math.max(1, Math.floor(GRID_BYTES / bytes));
}

async function drawGrid({ place, ask, show }, session) {
  const [layers, heads] = sizes(session);
  const grid = emptyGrid(layers, heads, (layer, head) => session.open("heatmap", { layer, head }));
  const progress = element("progress", { max: layers, value: 0, "aria-label": "Layers drawn" });
  place.replaceChildren(progress, grid.node);
  show();
  for (let layer = 0; layer < layers; layer = progress.value) {
    const some = count(layers).slice(layer, layer + layersAtOnce(session, heads));
    const part = some.length < layers ? { layers: some } : {};
    const answer = await ask({ method: "attention", ...part, dtype: "float16", encoding: "base64" });
    fillGrid(grid, answer, attentionOf(answer, session.state.kind));
    progress.value = layer + some.length;
    await new Promise(requestAnimationFrame);
  }
  progress.remove();
}

function served({ ctx }, names) {
  return Object.entries(names).filter(([method]) => ctx.model.explain.includes(method));
}

function pathFields(session) {
  const pick = segments("Method", served(session, PATHS), session.state.path, (path) => set(session, { path }));
  return [pick, ...targetFields(session)];
}

async function drawPaths({ place, ask }, session) {
  const { path, target } = session.state;
  const answer = await ask({ method: path, ...(target ? { target } : {}) });
  const [entry] = answer.attention;
  const scores = element("div");
  const whole = element("div");
  drawAttributions(scores, answer, textsOf(session.ctx.input));
  const words = { label: `${PATHS[path]}: what each token rests on`, verb: "rests on" };
  drawMatrix(whole, matrixOf(answer, entry, entry.layers[0], entry.heads[0]), words);
  place.replaceChildren(scores, element("h4", {}, "Every token"), whole);
}

function methodFields(session) {
  const { state } = session;
  const fields = [segments("Method", served(session, METHODS), state.method, (method) => set(session, { method }))];
  const number = (label, name, most) => {
    const attributes = { type: "number", min: 1, max: most, value: state[name] };
    return field(label, attributes, (value) => set(session, { [name]: Math.min(Math.max(Number(value), 1), most) }));
  };
  if (state.method === "integrated_gradients") fields.push(number("Steps", "steps", 1000));
  if (state.method === "occlusion") fields.push(number("Tokens hidden together", "window", 32));
  return [...fields, ...targetFields(session)];
}

async function drawScores({ place, ask }, session) {
  const { method, target, steps, window } = session.state;
  const lacking = missing(session);
  if (lacking) {
    place.replaceChildren(element("p", { class: "attn-note" }, lacking));
    return;
  }
  const options = { integrated_gradients: { steps }, occlusion: { window } };
  const answer = await ask({ method, ...options[method], ...(target ? { target } : {}) });
  drawAttributions(place, answer, textsOf(session.ctx.input));
}
