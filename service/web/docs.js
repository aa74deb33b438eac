// The page /docs: every route of /openapi.json, with its parameters, its body, an example and its answers.
//
// The details of an operation are built when it is first opened. If the server has keys, the page asks for one.

import * as api from "./api.js";
import { curlCommand } from "./copy.js";
import { decodePart, element } from "./dom.js";
import { example, fieldsTable, describeType } from "./schema.js";
import { connectThemeButton } from "./theme.js";

const byId = (id) => document.getElementById(id);

async function loadRoutes() {
  byId("key-form").hidden = true;
  byId("key-open").hidden = !api.key();
  byId("routes").replaceChildren();
  byId("filter").disabled = true;
  let description;
  try {
    description = await api.request("/openapi.json");
  } catch (error) {
    showLoadError(error);
    return;
  }
  byId("routes").replaceChildren(...sections(description.paths));
  byId("filter").disabled = false;
  filter();
  openLinkedRoute();
}

function showLoadError(error) {
  if (error.status !== 401 && error.status !== 403) {
    byId("count").textContent = error.message;
    return;
  }
  byId("count").textContent = "";
  byId("key-form").hidden = false;
  byId("key-error").textContent = api.key() ? error.message : "";
  byId("key").focus();
}

// A section for each tag, in the order of the description.
function sections(paths) {
  const byTag = new Map();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), operationDetails(path, method.toUpperCase(), operation)]);
    }
  }
  return [...byTag].map(([tag, operations]) => element("section", {}, element("h2", {}, tag), ...operations));
}

function operationDetails(path, method, operation) {
  const summary = element("summary", {},
    element("span", { class: `method ${method.toLowerCase()}` }, method),
    element("code", {}, path),
    element("span", { class: "hint" }, operation.summary ?? ""));
  const searchText = `${method} ${path} ${operation.summary ?? ""}`.toLowerCase();
  const details = element("details", { id: `${method.toLowerCase()}-${path}`, class: "operation", "data-search": searchText }, summary);
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) details.append(content(path, method, operation));
  });
  return details;
}

function content(path, method, operation) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const needsKey = operation.security?.length > 0;
  return element("div", { class: "content" },
    operation.description ? element("p", {}, operation.description) : null,
    element("p", { class: "hint" }, needsKey ? "Needs a key where the server has keys: the header Authorization: Bearer KEY." : "Needs no key."),
    ...parameters(operation.parameters ?? []),
    ...(body ? [element("h3", {}, "Body, application/json"), fieldsTable(body)] : []),
    element("h3", {}, body ? "Example, with the required fields" : "Example"),
    code(curlCommand(path, body ? example(body) : null, method)),
    element("h3", {}, "Answers"),
    answers(operation.responses),
  );
}

function parameters(list) {
  if (!list.length) return [];
  const rows = list.map((each) => element("tr", {},
    element("td", {}, element("code", {}, each.name)), element("td", {}, `in the ${each.in}`), element("td", {}, describeType(each.schema))));
  return [element("h3", {}, "Parameters"), table(["Name", "Where", "Type"], rows)];
}

function answers(responses) {
  const rows = Object.entries(responses).map(([status, answer]) => {
    const types = Object.entries(answer.content ?? {});
    const shapes = types.filter(([, { schema }]) => schema?.properties).map(([, { schema }]) => fieldsTable(schema));
    return element("tr", {},
      element("td", {}, element("code", {}, status)),
      element("td", {}, answer.description, element("p", { class: "hint" }, types.map(([kind]) => kind).join(", ")),
        ...(shapes.length ? [element("details", {}, element("summary", {}, "Fields"), ...shapes)] : [])));
  });
  return table(["Status", "Meaning"], rows);
}

function table(names, rows) {
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function code(text) {
  return element("pre", { tabindex: "0", "aria-label": "The request as a shell command" }, element("code", {}, text));
}

function filter() {
  const search = byId("filter").value.trim().toLowerCase();
  let count = 0;
  for (const section of byId("routes").children) {
    const operations = [...section.querySelectorAll(".operation")];
    for (const each of operations) each.hidden = !each.dataset.search.includes(search);
    const shown = operations.filter((each) => !each.hidden).length;
    section.hidden = !shown;
    count += shown;
  }
  byId("count").textContent = count === 1 ? "1 route" : `${count} routes`;
}

// An address such as /docs#post-/v1/completions opens that route.
function openLinkedRoute() {
  const linked = byId(decodePart(location.hash.slice(1)));
  if (!linked?.matches(".operation")) return;
  linked.open = true;
  linked.scrollIntoView();
}

byId("filter").addEventListener("input", filter);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.storeKey(byId("key").value.trim());
  byId("key").value = "";
  loadRoutes();
});
byId("key-open").addEventListener("click", () => {
  api.storeKey("");
  loadRoutes();
});
window.addEventListener("hashchange", openLinkedRoute);
connectThemeButton(byId("theme"));
loadRoutes();
