// How the server is: live requests, the queue, the cache, how long things take; out of /metrics, looked at every 2 s.
//
// Knows no task.  The one idea: the page keeps its last looks and draws what lies between them; who does not look at
// it asks for nothing.

import { mountAdmin } from "./admin.js";
import * as api from "./api.js";
import { drawn, element, number } from "./dom.js";
import { Look, quantile, rate } from "./prometheus.js";

const EVERY_MS = 2000;
const KEPT = 150; // looks: five minutes
const LATELY = 30; // looks that a percentile is about: one minute
const GIB = 2 ** 30;

const now = (name) => (looks) => looks.at(-1).total(`polyhead_${name}`);
const speed = (name, wanted) => (looks) => looks.length > 1 ? rate(looks.at(-2), looks.at(-1), `polyhead_${name}`, wanted) : NaN;
const lately = (name, share, wanted) => (looks) =>
  looks.length > 1 ? quantile(looks[Math.max(0, looks.length - LATELY)], looks.at(-1), `polyhead_${name}`, share, wanted) : NaN;

const TILES = [
  ["Live requests", now("http_requests_in_flight"), count],
  ["Running", now("requests_running"), count],
  ["Waiting", now("requests_waiting"), count],
  ["Cache blocks used", now("kv_blocks_used"), count],
  ["Tokens computed / s", speed("tokens_total", { kind: "computed" }), number],
  ["Tokens written / s", speed("tokens_total", { kind: "generated" }), number],
  ["Latency, median", lately("request_seconds", 0.5), duration],
  ["Latency, 95 %", lately("request_seconds", 0.95), duration],
  ["Latency, 99 %", lately("request_seconds", 0.99), duration],
  ["First token, 95 %", lately("time_to_first_token_seconds", 0.95), duration],
  ["Between tokens, median", lately("inter_token_seconds", 0.5), duration],
  ["In the queue, 95 %", lately("stage_seconds", 0.95, { stage: "queue" }), duration],
  ["Memory", (looks) => looks.at(-1).total("process_resident_memory_bytes"), (bytes) => `${number(bytes / GIB)} GiB`],
];
const HEADS = ["Model", "State", "Task", "Running", "Waiting", "Answered", "Median", "95 %", "Cache blocks"];

function count(value) {
  return Number.isFinite(value) ? String(Math.round(value)) : "–";
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 1 ? `${number(seconds * 1000)} ms` : `${number(seconds)} s`;
}

export function mountServer(panel, page) {
  const error = element("p", { class: "error", role: "alert" });
  const tiles = TILES.map(([name, value, write]) => new Tile(name, value, write));
  const rows = element("tbody");
  const table = element("table", { class: "plain" }, element("caption", {}, "Models"),
    element("thead", {}, element("tr", {}, ...HEADS.map((each) => element("th", { scope: "col" }, each)))), rows);
  const admin = element("section", { class: "admin", "aria-label": "Administration" });
  const looks = [];
  let timer = 0;
  let shown = false;
  panel.replaceChildren(error, element("dl", { class: "tiles" }, ...tiles.map((tile) => tile.node)),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Models" }, table),
    element("p", { class: "hint" }, "Percentiles are of the last minute; lines of the last five."), admin);

  async function look() {
    clearTimeout(timer);
    if (!shown || document.hidden) return;
    try {
      const [text, states] = await Promise.all([api.text("/metrics"), api.readiness()]);
      looks.push(new Look(text, performance.now()));
      looks.splice(0, looks.length - KEPT);
      for (const tile of tiles) tile.draw(looks);
      rows.replaceChildren(...Object.entries(states).map(([name, state]) => modelRow(name, state, looks)));
      error.textContent = "";
    } catch (problem) {
      error.textContent = problem.message;
    }
    timer = setTimeout(look, EVERY_MS);
  }

  document.addEventListener("visibilitychange", look);
  return {
    visible(is) {
      shown = is;
      clearTimeout(timer);
      if (!is) return;
      page.copyable("/metrics");
      mountAdmin(admin, page);
      look();
    },
  };
}

class Tile {
  constructor(name, value, write) {
    Object.assign(this, { value, write, history: [] });
    this.figure = element("dd", { class: "number" }, "–");
    this.line = drawn("polyline", { points: "" });
    const chart = drawn("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, this.line);
    this.node = element("div", { class: "tile" }, element("dt", {}, name), this.figure, element("dd", {}, chart));
  }

  draw(looks) {
    const value = this.value(looks);
    this.history = [...this.history, value].slice(-KEPT);
    this.figure.textContent = this.write(value);
    const most = Math.max(...this.history.filter(Number.isFinite), 1e-9);
    const points = this.history.map((each, index) => [100 - ((this.history.length - 1 - index) * 100) / (KEPT - 1), each]);
    this.line.setAttribute("points", points.filter(([, each]) => Number.isFinite(each))
      .map(([x, each]) => `${x.toFixed(1)},${(23 - (each / most) * 21).toFixed(1)}`).join(" "));
  }
}

function modelRow(name, state, looks) {
  const mine = { model: name };
  const last = looks.at(-1);
  const cells = [
    state.error ? `${state.state}: ${state.error}` : state.progress !== undefined ? `${state.state} ${Math.round(state.progress * 100)} %` : state.state,
    last.of("polyhead_model_info", mine)[0]?.labels.task ?? "",
    count(last.total("polyhead_requests_running", mine)),
    count(last.total("polyhead_requests_waiting", mine)),
    count(last.total("polyhead_requests_total", { ...mine, outcome: "done" })),
    duration(lately("request_seconds", 0.5, mine)(looks)),
    duration(lately("request_seconds", 0.95, mine)(looks)),
    blocks(last, mine),
  ];
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((each) => element("td", {}, each)));
}

function blocks(look, mine) {
  const all = look.total("polyhead_kv_blocks", mine);
  return all ? `${look.total("polyhead_kv_blocks_used", mine)} of ${all}` : "–";
}
