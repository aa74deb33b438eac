// The tab Server: live requests, the queue, the cache and latencies, from /metrics every 2 s, and recent errors.
//
// The page keeps its last scrapes and draws the differences. It scrapes only while the tab is visible; the server
// remembers the lines of the last five minutes.

import { mountAdmin } from "./admin.js";
import * as api from "./api.js";
import { svgElement, element, number } from "./dom.js";
import { Scrape, quantile, rate } from "./prometheus.js";

const INTERVAL_MS = 2000;
const MAX_SCRAPES = 150; // five minutes
const HISTORY_MS = 300_000; // of a line
const PERCENTILE_SCRAPES = 30; // scrapes of a percentile: one minute
const GIB = 2 ** 30;

const latest = (name) => (scrapes) => scrapes.at(-1).total(`polyhead_${name}`);
const currentRate = (name, wanted) => (scrapes) => scrapes.length > 1 ? rate(scrapes.at(-2), scrapes.at(-1), `polyhead_${name}`, wanted) : NaN;
const recentQuantile = (name, share, wanted) => (scrapes) =>
  scrapes.length > 1 ? quantile(scrapes[Math.max(0, scrapes.length - PERCENTILE_SCRAPES)], scrapes.at(-1), `polyhead_${name}`, share, wanted) : NaN;

// Name, value of the scrapes, format, and the name in /metrics/history.
const TILES = [
  ["Live requests", latest("http_requests_in_flight"), count, "http_requests_in_flight"],
  ["Running", latest("requests_running"), count, "requests_running"],
  ["Waiting", latest("requests_waiting"), count, "requests_waiting"],
  ["Cache blocks used", latest("kv_blocks_used"), count, "kv_blocks_used"],
  ["Tokens computed / s", currentRate("tokens_total", { kind: "computed" }), number, "computed_tokens_per_second"],
  ["Tokens generated / s", currentRate("tokens_total", { kind: "generated" }), number, "generated_tokens_per_second"],
  ["Latency, median", recentQuantile("request_seconds", 0.5), duration, "request_seconds_p50"],
  ["Latency, 95 %", recentQuantile("request_seconds", 0.95), duration, "request_seconds_p95"],
  ["Latency, 99 %", recentQuantile("request_seconds", 0.99), duration, "request_seconds_p99"],
  ["First token, 95 %", recentQuantile("time_to_first_token_seconds", 0.95), duration, "time_to_first_token_seconds_p95"],
  ["Inter-token, median", recentQuantile("inter_token_seconds", 0.5), duration, "inter_token_seconds_p50"],
  ["Queue, 95 %", recentQuantile("stage_seconds", 0.95, { stage: "queue" }), duration, "queue_seconds_p95"],
  ["Memory", (scrapes) => scrapes.at(-1).total("process_resident_memory_bytes"), (bytes) => `${number(bytes / GIB)} GiB`, "resident_memory_bytes"],
];
const ERROR_COLUMNS = ["Age", "Status", "Code", "Model", "Route", "Request id"];
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
  const tiles = TILES.map((each) => new Tile(...each));
  const [models, rows] = table("Models", COLUMNS);
  const [errors, errorRows] = table("Recent errors", ERROR_COLUMNS);
  const admin = element("section", { class: "admin", "aria-label": "Administration" });
  const scrapes = [];
  let timer = 0;
  let errorCount = NaN;
  let shown = false;
  panel.replaceChildren(error, element("dl", { class: "tiles" }, ...tiles.map((tile) => tile.node)),
    models, element("p", { class: "hint" }, "Percentiles are of the last minute, lines of the last five minutes."), errors, admin);

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
      await updateErrors();
    } catch (problem) {
      error.textContent = problem.message;
    }
    timer = setTimeout(scrape, INTERVAL_MS);
  }

  // The table is requested again if an error was counted since.
  async function updateErrors() {
    const counted = scrapes.at(-1).total("polyhead_rejections_total") + scrapes.at(-1).total("polyhead_failures_total");
    if (counted === errorCount) return;
    errorCount = counted;
    const found = (await api.request("/metrics/errors")).errors;
    errors.hidden = !found.length;
    errorRows.replaceChildren(...found.map(errorRow));
  }

  async function start() {
    const { samples } = await api.request("/metrics/history").catch(() => ({ samples: [] }));
    const now = performance.now();
    for (const tile of tiles) tile.remember(samples, now);
    await scrape();
  }

  document.addEventListener("visibilitychange", scrape);
  return {
    visible(isVisible) {
      shown = isVisible;
      clearTimeout(timer);
      if (!isVisible) return;
      page.showRequest("/metrics");
      mountAdmin(admin, page);
      errorCount = NaN;
      start();
    },
  };
}

class Tile {
  constructor(name, value, write, field) {
    Object.assign(this, { value, write, field, history: [] }); // history: [time in ms, value]
    this.figure = element("dd", { class: "number" }, "–");
    this.line = svgElement("polyline", { points: "" });
    const chart = svgElement("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, this.line);
    this.node = element("div", { class: "tile" }, element("dt", {}, name), this.figure, element("dd", {}, chart));
  }

  // The line that the server remembers.
  remember(samples, now) {
    if (samples.length) this.history = samples.map((each) => [now - each.seconds_ago * 1000, each[this.field] ?? NaN]);
  }

  draw(scrapes) {
    const value = this.value(scrapes);
    const now = scrapes.at(-1).at;
    this.history = [...this.history, [now, value]].filter(([at]) => now - at <= HISTORY_MS);
    this.figure.textContent = this.write(value);
    const shown = this.history.filter(([, each]) => Number.isFinite(each));
    const maximum = Math.max(...shown.map(([, each]) => each), 1e-9);
    this.line.setAttribute("points", shown
      .map(([at, each]) => `${(100 - ((now - at) * 100) / HISTORY_MS).toFixed(1)},${(23 - (each / maximum) * 21).toFixed(1)}`).join(" "));
  }
}

// A table in a region that scrolls, and its body.
function table(name, columns) {
  const rows = element("tbody");
  const head = element("tr", {}, ...columns.map((each) => element("th", { scope: "col" }, each)));
  const content = element("table", { class: "plain" }, element("caption", {}, name), element("thead", {}, head), rows);
  return [element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, content), rows];
}

function errorRow(each) {
  const cells = [each.status, each.code, each.model, each.route, each.request_id].map((value) => element("td", {}, String(value)));
  return element("tr", {}, element("td", {}, age(each.seconds_ago)), ...cells);
}

function age(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
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
