// JSON schemas as text: the type in words, a table of the fields, an example.

import { element } from "./dom.js";

const LIMITS = {
  minLength: "at least # characters", maxLength: "at most # characters", minItems: "at least # items",
  maxItems: "at most # items", minimum: "at least #", maximum: "at most #", exclusiveMinimum: "more than #",
};
const EXAMPLES = { model: "MODEL", role: "user", language: "en" };
const ALWAYS_SHOWN = ["content", "text", "instructions"]; // part of an example though not required

const choices = (schema) => schema.anyOf ?? schema.oneOf;
const isMap = (schema) => typeof schema.additionalProperties === "object" && !schema.properties;

// The type of a value in words, such as "string or list of integers".
export function describeType(schema) {
  if (choices(schema)) return [...new Set(choices(schema).map(describeType))].join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if (schema.type === "array") return `list of ${describeType(schema.items ?? {})}`;
  return [schema.type ?? "any value"].flat().join(" or ");
}

// A table of the fields, with nested objects collapsed. A choice of objects has one table for each.
export function fieldsTable(schema) {
  const objects = objectsIn(schema);
  if (!objects.length) return element("p", {}, describeType(schema));
  if (objects.length === 1) return objectTable(objects[0]);
  const unfold = (object) => collapsed(object.title ?? "object", () => objectTable(object));
  return element("div", {}, element("p", { class: "hint" }, "One of:"), ...objects.map(unfold));
}

// The objects of the schema, also in a choice, in a list, or under names that the client chooses.
function objectsIn(schema) {
  if (choices(schema)) return choices(schema).flatMap(objectsIn);
  if (schema.type === "array") return objectsIn(schema.items ?? {});
  if (isMap(schema)) return objectsIn(schema.additionalProperties);
  return schema.properties ? [schema] : [];
}

function objectTable(object) {
  const required = new Set(object.required ?? []);
  const names = Object.keys(object.properties).sort((a, b) => required.has(b) - required.has(a));
  const rows = names.map((name) => {
    const field = object.properties[name];
    return element("tr", {},
      element("td", {}, element("code", {}, name)),
      element("td", {}, describeType(field), ...(objectsIn(field).length ? [collapsed("Its fields", () => fieldsTable(field))] : [])),
      element("td", {}, required.has(name) ? "required" : defaultText(field)),
      element("td", {}, [field.description, ...describeLimits(field)].filter(Boolean).join("; ")));
  });
  const head = ["Field", "Type", "Default", "Notes"].map((name) => element("th", { scope: "col" }, name));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

function collapsed(title, draw) {
  const details = element("details", {}, element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.childElementCount === 1) details.append(draw());
  });
  return details;
}

function defaultText(field) {
  return field.default === undefined ? "" : JSON.stringify(field.default);
}

function describeLimits(field) {
  return Object.entries(LIMITS).filter(([name]) => field[name] !== undefined).map(([name, text]) => text.replace("#", field[name]));
}

// The simplest alternative of a choice: a string if there is one.
function simplestChoice(schema) {
  const flatten = (each) => (choices(each) ? choices(each).flatMap(flatten) : [each]);
  return flatten(schema).find((each) => each.type === "string") ?? flatten(schema)[0];
}

// A value that the schema allows, with the required fields only.
export function example(schema, name = "") {
  if (choices(schema)) return example(simplestChoice(schema), name);
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum.includes(EXAMPLES[name]) ? EXAMPLES[name] : schema.enum[0];
  switch (schema.type) {
    case "object": {
      if (isMap(schema)) return schema.minProperties ? { NAME: example(schema.additionalProperties) } : {};
      const names = Object.keys(schema.properties ?? {}).filter((each) => schema.required?.includes(each) || ALWAYS_SHOWN.includes(each));
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
