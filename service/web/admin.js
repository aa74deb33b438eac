// Administration: a form that loads a model and buttons that unload one, for callers with an administrator's key.
//
// GET /v2 lists whether the server has routes for it; only then the page asks for the key. The key is stored apart from
// the key for requests to models.

import * as api from "./api.js";
import { element, number } from "./dom.js";
import { field, textInput } from "./form.js";

const STORAGE_KEY = "polyhead-admin-key";
const EXTENSION = "model_repository"; // in the extensions of GET /v2 if the server has the routes
const MIB = 2 ** 20;

export async function mountAdmin(section, page) {
  const server = await api.request("/v2").catch(() => ({ extensions: [] }));
  if (!server.extensions.includes(EXTENSION)) {
    section.replaceChildren();
    return;
  }
  if (!section.childElementCount || !section.admin) new Admin(section, page).show();
}

class Admin {
  constructor(section, page) {
    section.admin = this;
    this.page = page;
    this.section = section;
    this.error = element("p", { class: "error", role: "alert" });
    this.status = element("p", { class: "hint", role: "status" });
    this.content = element("div");
    section.replaceChildren(element("h2", {}, "Administration"), this.content, this.status, this.error);
  }

  get key() {
    return sessionStorage.getItem(STORAGE_KEY) ?? "";
  }

  request(path, body, method) {
    return api.request(path, body, { method, apiKey: this.key });
  }

  async show() {
    if (!this.key) {
      this.showKeyForm();
      return;
    }
    try {
      this.showModels(await this.request("/admin/models"));
      this.error.textContent = "";
    } catch (error) {
      this.error.textContent = error.message;
      if (error.status === 401 || error.status === 403) this.showKeyForm();
    }
  }

  showKeyForm() {
    sessionStorage.removeItem(STORAGE_KEY);
    const key = element("input", { type: "password", autocomplete: "off", required: true });
    const form = element("form", { class: "inline" }, field("Administrator's key", key), element("button", { type: "submit" }, "Administer"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORAGE_KEY, key.value.trim());
      this.show();
    });
    this.content.replaceChildren(form);
  }

  showModels({ models, memory }) {
    const rows = models.map((each) => element("tr", {}, element("th", { scope: "row" }, each.name), element("td", {}, each.source),
      element("td", {}, each.error ?? each.state), element("td", {}, `${number(each.memory_bytes / MIB)} MiB`),
      element("td", {}, `${number(each.explain_memory_bytes / MIB)} MiB`),
      element("td", {}, element("button", { type: "button", class: "quiet", onclick: () => this.unload(each.name) }, `Unload ${each.name}`))));
    const columns = ["Name", "Source", "State", "Memory", "Explainer memory", "Action"].map((each) => element("th", { scope: "col" }, each));
    const free = `${number(memory.free_bytes / MIB)} of ${number(memory.limit_bytes / MIB)} MiB are free.`;
    this.content.replaceChildren(
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Served models" },
        element("table", { class: "plain" }, element("caption", {}, free), element("thead", {}, element("tr", {}, ...columns)), element("tbody", {}, ...rows))),
      this.loadForm());
  }

  loadForm() {
    const [name, source] = [textInput(), textInput()];
    for (const each of [name, source]) each.required = true;
    const form = element("form", { class: "inline" }, field("Name", name), field("Source", source), element("button", { type: "submit" }, "Load"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.changeModel(`Loading ${name.value} …`, "/admin/models", { name: name.value.trim(), source: source.value.trim() }, "POST");
    });
    return form;
  }

  unload(name) {
    this.changeModel(`Unloading ${name} …`, `/admin/models/${name}`, null, "DELETE");
  }

  async changeModel(text, path, body, method) {
    this.status.textContent = text;
    this.error.textContent = "";
    this.page.showRequest("/admin/models");
    try {
      const { name, state } = await this.request(path, body, method);
      this.status.textContent = `${name}: ${state}`;
      await this.show();
      this.page.onChange();
    } catch (error) {
      this.status.textContent = "";
      this.error.textContent = error.message;
    }
  }
}
