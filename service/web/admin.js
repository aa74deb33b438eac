// Models loaded and unloaded, for whoever has a key that may.
//
// The one idea: the server says whether it can be administered at all before anybody is asked for a key; that key is
// kept apart from the one that asks models.

import * as api from "./api.js";
import { element, number } from "./dom.js";
import { field, line } from "./form.js";

const KEY = "polyhead-admin-key";
const EXTENSION = "model_repository"; // named at GET /v2 where there are routes for it
const MIB = 2 ** 20;

export async function mountAdmin(section, page) {
  const said = await api.request("/v2").catch(() => ({ extensions: [] }));
  if (!said.extensions.includes(EXTENSION)) {
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
    this.told = element("p", { class: "hint", role: "status" });
    this.inside = element("div");
    section.replaceChildren(element("h2", {}, "Administration"), this.inside, this.told, this.error);
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  request(path, body, method) {
    return api.request(path, body, { method, as: this.key });
  }

  async show() {
    if (!this.key) {
      this.ask();
      return;
    }
    try {
      this.list(await this.request("/admin/models"));
      this.error.textContent = "";
    } catch (problem) {
      this.error.textContent = problem.message;
      if (problem.status === 401 || problem.status === 403) this.ask();
    }
  }

  ask() {
    sessionStorage.removeItem(KEY);
    const key = element("input", { type: "password", autocomplete: "off", required: true });
    const form = element("form", { class: "inline" }, field("Key of an administrator", key), element("button", { type: "submit" }, "Administer"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, key.value.trim());
      this.show();
    });
    this.inside.replaceChildren(form);
  }

  list({ models, memory }) {
    const rows = models.map((each) => element("tr", {}, element("th", { scope: "row" }, each.name), element("td", {}, each.source),
      element("td", {}, each.error ?? each.state), element("td", {}, `${number(each.memory_bytes / MIB)} MiB`),
      element("td", {}, `${number(each.explain_memory_bytes / MIB)} MiB`),
      element("td", {}, element("button", { type: "button", class: "quiet", onclick: () => this.unload(each.name) }, `Unload ${each.name}`))));
    const heads = ["Name", "Source", "State", "Memory", "To explain", "Change"].map((each) => element("th", { scope: "col" }, each));
    const free = `${number(memory.free_bytes / MIB)} of ${number(memory.limit_bytes / MIB)} MiB are free.`;
    this.inside.replaceChildren(
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Served models" },
        element("table", { class: "plain" }, element("caption", {}, free), element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows))),
      this.loader());
  }

  loader() {
    const [name, source] = [line(), line()];
    for (const each of [name, source]) each.required = true;
    const form = element("form", { class: "inline" }, field("Name", name), field("Source", source), element("button", { type: "submit" }, "Load"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.change(`Loading ${name.value} …`, "/admin/models", { name: name.value.trim(), source: source.value.trim() }, "POST");
    });
    return form;
  }

  unload(name) {
    this.change(`Unloading ${name} …`, `/admin/models/${name}`, null, "DELETE");
  }

  async change(sentence, path, body, method) {
    this.told.textContent = sentence;
    this.error.textContent = "";
    this.page.copyable("/admin/models");
    try {
      const { name, state } = await this.request(path, body, method);
      this.told.textContent = `${name}: ${state}`;
      await this.show();
      this.page.changed();
    } catch (problem) {
      this.told.textContent = "";
      this.error.textContent = problem.message;
    }
  }
}
