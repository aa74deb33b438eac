// The page: which model, which tab, and who draws what.
//
// Knows no task beyond the table below.  The one idea: a model's head decides the form; a form draws into a panel and
// can say what it has asked, which is what the tab Attention explains.

import * as api from "./api.js";
import { mountAttention } from "./attention.js";
import { mountChat } from "./chat.js";
import { mountClassify } from "./classify.js";
import { mountCompletion } from "./completion.js";
import { copying } from "./copy.js";
import { element } from "./dom.js";
import { mountEmbed } from "./embed.js";
import { mountFill } from "./fill.js";
import { mountRank } from "./rank.js";
import { mountServer } from "./server.js";
import { mountSpan } from "./span.js";
import { tabbed } from "./tabs.js";
import { mountTag } from "./tag.js";
import { themed } from "./theme.js";
import { mountTranslate } from "./translate.js";

const FORMS = {
  classify: mountClassify, rank: mountRank, embed: mountEmbed, tag: mountTag, span: mountSpan, fill: mountFill,
  chat: mountChat, completion: mountCompletion, translate: mountTranslate,
};
const AGAIN_MS = 1500; // while models load

const at = (id) => document.getElementById(id);
const copyPanel = copying(at("copy"));
const copied = {}; // the last request of each tab
let models = [];
let model = null;
let view = null;
let tab = "try";
let server = null;

function formOf(entry) {
  if (entry.task !== "generate") return entry.task;
  if ((entry.tasks ?? []).includes("text2text-generation")) return "translate";
  return entry.chat === false ? "completion" : "chat";
}

function copyable(where, path, body = null) {
  copied[where] = [path, body];
  if (where === tab) copyPanel(path, body);
}

// What forms have of the page.
function pageFor(where) {
  return {
    model,
    request: (path, body, signal) => api.request(path, body, { signal }),
    events: api.events,
    copyable: (path, body) => copyable(where, path, body),
    changed: () => tab === "attention" && explained(),
  };
}

function pick(name) {
  model = models.find((each) => each.id === name) ?? models[0];
  at("model").value = model.id;
  view?.leave?.();
  delete copied.try;
  view = FORMS[formOf(model)](at("panel-try"), pageFor("try"));
  remembered();
  opened(tab);
}

// The Attention tab is about what is on the screen: drawn anew whenever it is opened, or what it is about changes.
function opened(name) {
  tab = name;
  remembered();
  at("copy").hidden = !copied[tab];
  if (copied[tab]) copyPanel(...copied[tab]);
  server.visible(tab === "server");
  if (tab === "attention") explained();
}

function explained() {
  const asked = view.asked();
  mountAttention(at("panel-attention"), {
    ...pageFor("attention"),
    request: api.request,
    input: asked.input,
    output: asked.output ?? "",
    target: asked.target ?? null,
  });
}

// A page that is loaded again shows the same model and tab.
function remembered() {
  if (model) history.replaceState(null, "", `#${tab}/${encodeURIComponent(model.id)}`);
}

function told(sentence) {
  at("notice").textContent = sentence;
  at("notice").hidden = !sentence;
}

async function begin() {
  const [wantedTab, wanted] = location.hash.slice(1).split("/").map(decodeURIComponent);
  try {
    models = (await api.request("/v1/models")).data;
  } catch (error) {
    refused(error);
    return;
  }
  at("key-form").hidden = true;
  at("key-open").hidden = !api.key();
  told("");
  if (!models.length) {
    await waiting();
    return;
  }
  listed();
  at("tabs").hidden = false;
  tab = ["try", "attention", "server"].includes(wantedTab) ? wantedTab : "try";
  pick(wanted);
  tabs.open(tab);
  completed();
}

async function waiting() {
  const states = await api.readiness().catch(() => ({}));
  const loading = Object.entries(states).map(([name, each]) => `${name}: ${each.error ?? each.state}`);
  told(`No model is ready yet. ${loading.join(", ")}`);
  setTimeout(begin, AGAIN_MS);
}

function listed() {
  at("model").replaceChildren(...models.map((each) => element("option", { value: each.id }, each.id)));
}

// Models that are ready later than others get into the list, while somebody works with these.
async function completed() {
  const states = await api.readiness().catch(() => ({}));
  if (!Object.values(states).some((each) => each.state === "loading" || each.state === "waiting")) return;
  await new Promise((done) => setTimeout(done, AGAIN_MS));
  models = (await api.request("/v1/models")).data;
  listed();
  at("model").value = model.id;
  completed();
}

function refused(error) {
  if (error.status !== 401 && error.status !== 403) {
    told(error.message);
    setTimeout(begin, AGAIN_MS);
    return;
  }
  at("tabs").hidden = true;
  at("copy").hidden = true;
  at("key-form").hidden = false;
  at("key-error").textContent = api.key() ? error.message : "";
  at("key").focus();
}

at("model").addEventListener("change", (event) => pick(event.target.value));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.remember(at("key").value.trim());
  at("key").value = "";
  begin();
});
at("key-open").addEventListener("click", () => {
  api.remember("");
  begin();
});
themed(at("theme"));
server = mountServer(at("panel-server"), { copyable: (path, body) => copyable("server", path, body), changed: begin });
const tabs = tabbed(document.querySelector("[role=tablist]"), opened);
begin();
