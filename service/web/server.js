// The tab Server: live requests, the queue, the cache and latencies, from /metrics every 2 s.
//
// The page keeps its last scrapes and draws the differences. It scrapes only while the tab is visible.

import { mountAdmin } from "./admin.js";
import * as api from "./api.js";
import { svgElement, element, number } from "./dom.js";
import { Scrape, quantile, rate } from "./prometheus.js";

const INTERVAL_MS = 2000;
const MAX_SCRAPES = 150; // five minutes
const PERCENTILE_SCRAPES = 30; // scrapes of a percentile: one minute
const GIB = 2 ** 30;

const latest = (name) => (scrapes) => scrapes.at(-1).total(`polyhead_${name}`);
const currentRate = (name, wanted) => (scrapes) => scrapes.length > 1 ? rate(scrapes.at(-2), scrapes.at(-1), `polyhead_${name}`, wanted) : NaN;
const recentQuantile = (name, share, wanted) => (scrapes) =>
  scrapes.length > 1 ? quantile(scrapes[Math.max(0, scrapes.length - PERCENTILE_SCRAPES)], scrapes.at(-1), `polyhead_${name}`, share, wanted) : NaN;

const TILES = [
  ["Live requests", latest("http_requests_in_flight"), count],
  ["Running", latest("requests_running"), count],
  ["Waiting", latest("requests_waiting"), count],
  ["Cache blocks used", latest("kv_blocks_used"), count],
  ["Tokens computed / s", currentRate("tokens_total", { kind: "computed" }), number],
  ["Tokens generated / s", currentRate("tokens_total", { kind: "generated" }), number],
  ["Latency, median", recentQuantile("request_seconds", 0.5), duration],
  ["Latency, 95 %", recentQuantile("request_seconds", 0.95), duration],
  ["Latency, 99 %", recentQuantile("request_seconds", 0.99), duration],
  ["First token, 95 %", recentQuantile("time_to_first_token_seconds", 0.95), duration],
  ["Inter-token, median", recentQuantile("inter_token_seconds", 0.5), duration],
  ["Queue, 95 %", recentQuantile("stage_seconds", 0.95, { stage: "queue" }), duration],
  ["Memory", (scrapes) => scrapes.at(-1).total("process_resident_memory_bytes"), (bytes) => `${number(bytes / GIB)} GiB`],
];
const COLUMNS = ["Model", "State", "Task", "Running", "Waiting", "Done", "Median", "95 %", "Cache blocks"];

function count(value) {
  return Number.isFinite(value) ? String(Math.round(value)) : "–";
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 1 ? `${number(seconds * 1000)} ms` : `${number(seconds)} s`;
}

export function mountServer(panel, page) {
  const error = element("p", { class: "error", role: "alert" });
  const tiles = TILES.map(([name, value, format]) => new Tile(name, value, format));
  const rows = element("tbody");
  const table = element("table", { class: "plain" }, element("caption", {}, "Models"),
    element("thead", {}, element("tr", {}, ...COLUMNS.map((each) => element("th", { scope: "col" }, each)))), rows);
  const admin = element("section", { class: "admin", "aria-label": "Administration" });
  const scrapes = [];
  let timer = 0;
  let shown = false;
  panel.replaceChildren(error, element("dl", { class: "tiles" }, ...tiles.map((tile) => tile.node)),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Models" }, table),
    element("p", { class: "hint" }, "Percentiles are of the last minute, lines of the last five minutes."), admin);

  async function scrape() {
    clearTimeout(timer);
    if (!shown || document.hidden) return;
    try {
      const [text, states] = await Promise.all([api.text("/metrics"), api.readiness()]);
      scrapes.push(new Scrape(text, performance.now()));
      scrapes.splice(0, scrapes.length - MAX_SCRAPES);
      for (const tile of tiles) tile.draw(scrapes);
      rows.replaceChildren(...Object.entries(states).map(([name, state]) => modelRow(name, state, scrapes)));
      error.textContent = "";
    } catch (problem) {
      error.textContent = problem.message;
    }
    timer = setTimeout(scrape, INTERVAL_MS);
  }

  document.addEventListener("visibilitychange", scrape);
  return {
    visible(isVisible) {
      shown = isVisible;
      clearTimeout(timer);
      if (!isVisible) return;
      page.showRequest("/metrics");
      mountAdmin(admin, page);
      scrape();
    },
  };
}

class Tile {
  constructor(name, value, write) {
    Object.assign(this, { value, write, history: [] });
    this.figure = element("dd", { class: "number" }, "–");
    this.line = svgElement("polyline", { points: "" });
    const chart = svgElement("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, this.line);
    this.node = element("div", { class: "tile" }, element("dt", {}, name), this.figure, element("dd", {}, chart));
  }

  draw(scrapes) {
    const value = this.value(scrapes);
    this.history = [...this.history, value].slice(-MAX_SCRAPES);
    this.figure.textContent = this.write(value);
    const maximum = Math.max(...this.history.filter(Number.isFinite), 1e-9);
    const points = this.history.map((each, index) => [100 - ((this.history.length - 1 - index) * 100) / (MAX_SCRAPES - 1), each]);
    this.line.setAttribute("points", points.filter(([, each]) => Number.isFinite(each))
      .map(([x, each]) => `${x.toFixed(1)},${(23 - (each / maximum) * 21).toFixed(1)}`).join(" "));
  }
}

function modelRow(name, state, scrapes) {
  const labels = { model: name };
  const last = scrapes.at(-1);
  const cells = [
    state.error ? `${state.state}: ${state.error}` : state.progress !== undefined ? `${state.state} ${Math.round(state.progress * 100)} %` : state.state,
    last.find("polyhead_model_info", labels)[0]?.labels.task ?? "",
    count(last.total("polyhead_requests_running", labels)),
    count(last.total("polyhead_requests_waiting", labels)),
    count(last.total("polyhead_requests_total", { ...labels, outcome: "done" })),
    duration(recentQuantile("request_seconds", 0.5, labels)(scrapes)),
    duration(recentQuantile("request_seconds", 0.95, labels)(scrapes)),
    cacheBlocks(last, labels),
  ];
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((each) => element("td", {}, each)));
}

function cacheBlocks(last, labels) {
  const total = last.total("polyhead_kv_blocks", labels);
  return total ? `${last.total("polyhead_kv_blocks_used", labels)} of ${total}` : "–";
}
