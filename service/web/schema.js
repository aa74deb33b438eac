// JSON schemas for people: the fields of an object as a table, its type in words, an example of it.

import { element } from "./dom.js";

const LIMITS = {
  minLength: "at least # characters", maxLength: "at most # characters", minItems: "at least # items",
  maxItems: "at most # items", minimum: "at least #", maximum: "at most #", exclusiveMinimum: "more than #",
};
const EXAMPLES = { model: "MODEL", role: "user", language: "en" };
const SHOWN = ["content", "text"]; // not required of every message, but of those in examples

const choices = (schema) => schema.anyOf ?? schema.oneOf;

// What a value may be, as in "string or list of integers".
export function typeOf(schema) {
  if (choices(schema)) return [...new Set(choices(schema).map(typeOf))].join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return [schema.type ?? "any value"].flat().join(" or ");
}

// A table of the fields; objects in it unfold in their turn. Of several objects one table for each.
export function fieldsOf(schema) {
  const objects = objectsIn(schema);
  if (!objects.length) return element("p", {}, typeOf(schema));
  if (objects.length === 1) return tableOf(objects[0]);
  const each = (object) => folded(object.title ?? "object", () => tableOf(object));
  return element("div", {}, element("p", { class: "hint" }, "One of:"), ...objects.map(each));
}

// Objects that the schema describes itself, in a choice or in a list.
function objectsIn(schema) {
  if (choices(schema)) return choices(schema).flatMap(objectsIn);
  if (schema.type === "array") return objectsIn(schema.items ?? {});
  return schema.properties ? [schema] : [];
}

function tableOf(object) {
  const required = new Set(object.required ?? []);
  const names = Object.keys(object.properties).sort((a, b) => required.has(b) - required.has(a));
  const rows = names.map((name) => {
    const field = object.properties[name];
    return element("tr", {},
      element("td", {}, element("code", {}, name)),
      element("td", {}, typeOf(field), ...(objectsIn(field).length ? [folded("Its fields", () => fieldsOf(field))] : [])),
      element("td", {}, required.has(name) ? "required" : fallback(field)),
      element("td", {}, [field.description, ...limits(field)].filter(Boolean).join("; ")));
  });
  const head = ["Field", "Type", "Default", "Notes"].map((name) => element("th", { scope: "col" }, name));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

function folded(title, draw) {
  const details = element("details", {}, element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) details.append(draw());
  });
  return details;
}

function fallback(field) {
  return field.default === undefined ? "" : JSON.stringify(field.default);
}

function limits(field) {
  return Object.entries(LIMITS).filter(([name]) => field[name] !== undefined).map(([name, text]) => text.replace("#", field[name]));
}

// Of a choice: a text where it may be one.
function simplest(schema) {
  const flat = (each) => (choices(each) ? choices(each).flatMap(flat) : [each]);
  return flat(schema).find((each) => each.type === "string") ?? flat(schema)[0];
}

// A value that the schema allows, with required fields alone.
export function example(schema, name = "") {
  if (choices(schema)) return example(simplest(schema), name);
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum.includes(EXAMPLES[name]) ? EXAMPLES[name] : schema.enum[0];
  switch (schema.type) {
    case "object": {
      const names = Object.keys(schema.properties ?? {}).filter((each) => schema.required?.includes(each) || SHOWN.includes(each));
      return Object.fromEntries(names.map((each) => [each, example(schema.properties[each], each)]));
    }
    case "array":
      return [example(schema.items ?? {}, name)];
    case "integer":
    case "number":
      return schema.minimum ?? 1;
    case "boolean":
      return false;
    default:
      return EXAMPLES[name] ?? "Some text.";
  }
}
