// The page /docs: every route of /openapi.json, with its parameters, its body, an example and its answers.
//
// An operation is drawn when it is opened first. Where the server has keys, the page asks for one to read the description.

import * as api from "./api.js";
import { curl } from "./copy.js";
import { element } from "./dom.js";
import { example, fieldsOf, typeOf } from "./schema.js";
import { themed } from "./theme.js";

const at = (id) => document.getElementById(id);

async function begin() {
  at("key-form").hidden = true;
  at("key-open").hidden = !api.key();
  at("routes").replaceChildren();
  at("filter").disabled = true;
  let description;
  try {
    description = await api.request("/openapi.json");
  } catch (error) {
    refused(error);
    return;
  }
  at("routes").replaceChildren(...sections(description.paths));
  at("filter").disabled = false;
  filter();
  openLinked();
}

function refused(error) {
  if (error.status !== 401 && error.status !== 403) {
    at("count").textContent = error.message;
    return;
  }
  at("count").textContent = "";
  at("key-form").hidden = false;
  at("key-error").textContent = api.key() ? error.message : "";
  at("key").focus();
}

// A section for each tag, in the order of the description.
function sections(paths) {
  const tagged = new Map();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "other";
      tagged.set(tag, [...(tagged.get(tag) ?? []), operationOf(path, method.toUpperCase(), operation)]);
    }
  }
  return [...tagged].map(([tag, operations]) => element("section", {}, element("h2", {}, tag), ...operations));
}

function operationOf(path, method, operation) {
  const summary = element("summary", {},
    element("span", { class: `method ${method.toLowerCase()}` }, method),
    element("code", {}, path),
    element("span", { class: "hint" }, operation.summary ?? ""));
  const found = `${method} ${path} ${operation.summary ?? ""}`.toLowerCase();
  const details = element("details", { id: `${method.toLowerCase()}-${path}`, class: "operation", "data-found": found }, summary);
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) details.append(content(path, method, operation));
  });
  return details;
}

function content(path, method, operation) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const keyed = operation.security?.length > 0;
  return element("div", { class: "content" },
    operation.description ? element("p", {}, operation.description) : null,
    element("p", { class: "hint" }, keyed ? "Needs a key where the server has keys: the header Authorization: Bearer KEY." : "Needs no key."),
    ...parameters(operation.parameters ?? []),
    ...(body ? [element("h3", {}, "Body, application/json"), fieldsOf(body)] : []),
    element("h3", {}, body ? "Example, with the required fields" : "Example"),
    code(curl(path, body ? example(body) : null, method)),
    element("h3", {}, "Answers"),
    answers(operation.responses),
  );
}

function parameters(given) {
  if (!given.length) return [];
  const rows = given.map((each) => element("tr", {},
    element("td", {}, element("code", {}, each.name)), element("td", {}, `in the ${each.in}`), element("td", {}, typeOf(each.schema))));
  return [element("h3", {}, "Parameters"), table(["Name", "Where", "Type"], rows)];
}

function answers(responses) {
  const rows = Object.entries(responses).map(([status, answer]) => {
    const kinds = Object.entries(answer.content ?? {});
    const shapes = kinds.filter(([, { schema }]) => schema?.properties).map(([, { schema }]) => fieldsOf(schema));
    return element("tr", {},
      element("td", {}, element("code", {}, status)),
      element("td", {}, answer.description),
      element("td", {}, kinds.map(([kind]) => kind).join(", ")),
      element("td", {}, ...(shapes.length ? [element("details", {}, element("summary", {}, "Fields"), ...shapes)] : [])));
  });
  return table(["Status", "Meaning", "Type", "Fields"], rows);
}

function table(names, rows) {
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function code(text) {
  return element("pre", { tabindex: "0", "aria-label": "The request as a line for a shell" }, element("code", {}, text));
}

function filter() {
  const wanted = at("filter").value.trim().toLowerCase();
  let count = 0;
  for (const section of at("routes").children) {
    const operations = [...section.querySelectorAll(".operation")];
    for (const each of operations) each.hidden = !each.dataset.found.includes(wanted);
    const shown = operations.filter((each) => !each.hidden).length;
    section.hidden = !shown;
    count += shown;
  }
  at("count").textContent = count === 1 ? "1 route" : `${count} routes`;
}

// An address such as /docs#post-/v1/completions opens that route.
function openLinked() {
  const linked = at(decodeURIComponent(location.hash.slice(1)));
  if (!linked?.matches(".operation")) return;
  linked.open = true;
  linked.scrollIntoView();
}

at("filter").addEventListener("input", filter);
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
window.addEventListener("hashchange", openLinked);
themed(at("theme"));
begin();
