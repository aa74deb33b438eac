// The page: the selected model, the tabs and the forms.
//
// The task of a model selects its form. A form draws into a panel, and returns the input and the output that the tab
// Attention explains.

import * as api from "./api.js";
import { cancelAttention, mountAttention } from "./attention.js";
import { mountChat } from "./chat.js";
import { mountChoose } from "./choose.js";
import { mountClassify } from "./classify.js";
import { mountCompletion } from "./completion.js";
import { mountCopyPanel } from "./copy.js";
import { canDecide, mountDecide } from "./decide.js";
import { decodePart, element } from "./dom.js";
import { mountEmbed } from "./embed.js";
import { mountFill } from "./fill.js";
import { mountNoForm } from "./noform.js";
import { mountRank } from "./rank.js";
import { mountServer } from "./server.js";
import { connectShortcuts } from "./shortcuts.js";
import { mountSpan } from "./span.js";
import { connectTabs } from "./tabs.js";
import { mountTag } from "./tag.js";
import { connectThemeButton } from "./theme.js";
import { mountTranslate } from "./translate.js";

const FORMS = {
  classify: mountClassify, rank: mountRank, choose: mountChoose, embed: mountEmbed, tag: mountTag, span: mountSpan, fill: mountFill,
  chat: mountChat, completion: mountCompletion, translate: mountTranslate,
};
const TABS = ["try", "decide", "attention", "server"];
const RETRY_MS = 1500; // between requests while models load
const LAST_MODEL_KEY = "polyhead-model";

const byId = (id) => document.getElementById(id);
const copyPanel = mountCopyPanel(byId("copy"));
const lastRequests = {}; // the last request of each tab
let models = [];
let model = null;
let view = null;
let tab = "try";
let server = null;
let decisions = null;
let wantedModel = ""; // the model in the address when the page was opened
let isTouched = false; // whether the user has done anything on the page

function formName(entry) {
  if (entry.task !== "generate") return entry.task;
  if ((entry.tasks ?? []).includes("text2text-generation")) return "translate";
  return entry.chat === false ? "completion" : "chat";
}

function showRequest(ofTab, path, body = null) {
  lastRequests[ofTab] = [path, body];
  if (ofTab === tab) copyPanel(path, body);
}

// The functions and the model that a form gets from the page.
function pageContext(ofTab) {
  return {
    model,
    request: (path, body, signal) => api.request(path, body, { signal }),
    events: api.events,
    showRequest: (path, body) => showRequest(ofTab, path, body),
    onChange: () => tab === "attention" && updateAttention(),
  };
}

// The models that the open tab can use; all if it can use none.
function usableModels() {
  const able = tab === "decide" ? models.filter(canDecide) : models;
  return able.length ? able : models;
}

// The usable model of that name; else the one that was used last, a chat model, or the first.
function findModel(name) {
  const usable = usableModels();
  const named = (wanted) => usable.find((each) => each.id === wanted);
  return named(name) ?? named(localStorage.getItem(LAST_MODEL_KEY)) ?? usable.find((each) => formName(each) === "chat") ?? usable[0];
}

function selectModel(name) {
  model = findModel(name);
  view?.abort?.();
  delete lastRequests.try;
  view = (FORMS[formName(model)] ?? mountNoForm)(byId("panel-try"), pageContext("try"));
  updateAddress();
  showTab(tab);
}

// The tab Decide has only models that answer questions: another one is selected where the current one does not. The tab
// Attention explains the input and the answer on the screen. It is drawn again when they change.
function showTab(name) {
  tab = name;
  if (!usableModels().some((each) => each.id === model.id)) {
    selectModel("");
    return;
  }
  fillModelList();
  updateAddress();
  if (tab === "decide") decisions.selectModel(model);
  byId("copy").hidden = !lastRequests[tab];
  if (lastRequests[tab]) copyPanel(...lastRequests[tab]);
  server.visible(tab === "server");
  if (tab === "attention") updateAttention();
}

function updateAttention() {
  const subject = view.explainSubject();
  mountAttention(byId("panel-attention"), {
    ...pageContext("attention"),
    input: subject.input,
    output: subject.output ?? "",
    target: subject.target ?? null,
  });
}

// The fragment of the address has the tab and the model, so a reload shows the same ones.
function updateAddress() {
  if (model) history.replaceState(null, "", `#${tab}/${encodeURIComponent(model.id)}`);
}

function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

async function loadModels() {
  const [wantedTab, named = ""] = location.hash.slice(1).split("/").map(decodePart);
  try {
    models = (await api.request("/v1/models")).data;
    wantedModel = named;
  } catch (error) {
    showLoadError(error);
    return;
  }
  byId("key-form").hidden = true;
  byId("key-open").hidden = !api.key();
  showNotice("");
  if (!models.length) {
    await waitForModels();
    return;
  }
  byId("tabs").hidden = false;
  tab = TABS.includes(wantedTab) ? wantedTab : "try";
  selectModel(wantedModel);
  tabs.open(tab);
  pollLoadingModels();
}

async function waitForModels() {
  const states = await api.readiness().catch(() => ({}));
  const loading = Object.entries(states).map(([name, each]) => `${name}: ${each.error ?? each.state}`);
  showNotice(`No model is ready yet. ${loading.join(", ")}`);
  setTimeout(loadModels, RETRY_MS);
}

function fillModelList() {
  byId("model").replaceChildren(...usableModels().map((each) => element("option", { value: each.id }, each.id)));
  byId("model").value = model.id;
}

// Adds models to the list that become ready later. The page changes to a better one as long as it is not used.
async function pollLoadingModels() {
  const states = await api.readiness().catch(() => ({}));
  if (!Object.values(states).some((each) => ["waiting", "downloading", "loading"].includes(each.state))) return;
  await new Promise((done) => setTimeout(done, RETRY_MS));
  models = (await api.request("/v1/models")).data;
  fillModelList();
  if (!isTouched && findModel(wantedModel).id !== model.id) selectModel(wantedModel);
  pollLoadingModels();
}

function showLoadError(error) {
  if (error.status !== 401 && error.status !== 403) {
    showNotice(error.message);
    setTimeout(loadModels, RETRY_MS);
    return;
  }
  byId("tabs").hidden = true;
  byId("copy").hidden = true;
  byId("key-form").hidden = false;
  byId("key-error").textContent = api.key() ? error.message : "";
  byId("key").focus();
}

for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => { isTouched = true; }, { once: true });
byId("model").addEventListener("change", (event) => {
  localStorage.setItem(LAST_MODEL_KEY, event.target.value);
  selectModel(event.target.value);
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.storeKey(byId("key").value.trim());
  byId("key").value = "";
  loadModels();
});
byId("key-open").addEventListener("click", () => {
  api.storeKey("");
  loadModels();
});
connectThemeButton(byId("theme"));
server = mountServer(byId("panel-server"), { showRequest: (path, body) => showRequest("server", path, body), onChange: loadModels });
decisions = mountDecide(byId("panel-decide"), pageContext("decide"));
const tabs = connectTabs(document.querySelector("[role=tablist]"), showTab);
connectShortcuts(byId("shortcuts"), {
  ...Object.fromEntries(TABS.map((name, index) => [`Digit${index + 1}`, () => tabs.open(name)])),
  KeyM: () => byId("model").focus(),
  KeyI: () => document.querySelector("[role=tabpanel]:not([hidden]) :is(.composer textarea, textarea, input[type=text])")?.focus(),
  KeyN: () => { tabs.open("try"); view.clear?.(); },
  Escape: () => {
    if (tab === "attention") cancelAttention(byId("panel-attention"));
    else (tab === "decide" ? decisions : view)?.abort?.();
  },
});
loadModels();
