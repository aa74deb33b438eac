// The request that is on the screen, as a line for a shell and as a few for Python.
//
// Knows no task.  The one idea: what is copied is what was sent, and runs as it is; where a key is needed it is named,
// never shown.

import { address, key } from "./api.js";
import { element } from "./dom.js";

const VARIABLE = "POLYHEAD_API_KEY";
const LONGEST_LINE = 80;
const PYTHON = new Map([[null, "None"], [true, "True"], [false, "False"]]);
const WRITERS = { curl, Python: python };

export function curl(path, body, method = "") {
  const parts = [`curl -sS${body?.stream ? "N" : ""} ${quoted(address(path))}`];
  if (method && method !== (body === null ? "GET" : "POST")) parts.push(`-X ${method}`);
  if (key()) parts.push(`-H "Authorization: Bearer $${VARIABLE}"`);
  if (body !== null) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(laid(body, JSON.stringify))}`);
  return parts.join(" \\\n  ");
}

// Between single quotes a shell takes everything as it is, but for these themselves.
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function python(path, body) {
  const imports = [...(body?.stream ? ["import json"] : []), ...(key() ? ["import os"] : []), "", "import httpx", ""];
  if (!imports[0]) imports.shift();
  const given = [JSON.stringify(address(path))];
  if (key()) {
    imports.push(`headers = {"Authorization": f"Bearer {os.environ['${VARIABLE}']}"}`);
    given.push("headers=headers");
  }
  if (body !== null) {
    imports.push(`body = ${laid(body, pythonic)}`);
    given.push("json=body");
  }
  given.push("timeout=60");
  return [...imports, ...(body?.stream ? streaming(given) : plain(given, body, path))].join("\n");
}

function plain(given, body, path) {
  const answer = path.endsWith("/metrics") ? "answer.text" : "answer.json()";
  return [`answer = httpx.${body === null ? "get" : "post"}(${given.join(", ")})`, "answer.raise_for_status()", `print(${answer})`];
}

function streaming(given) {
  return [
    `with httpx.stream("POST", ${given.join(", ")}) as answer:`,
    "    answer.raise_for_status()",
    "    for line in answer.iter_lines():",
    '        if line.startswith("data: ") and line != "data: [DONE]":',
    '            for choice in json.loads(line[6:])["choices"]:',
    '                print(choice.get("text") or choice.get("delta", {}).get("content") or "", end="", flush=True)',
    "print()",
  ];
}

// JSON, on as few lines as can be read; `atom` spells what is neither a list nor an object.
function laid(value, atom, inside = "") {
  if (value === null || typeof value !== "object") return atom(value);
  const deeper = `${inside}  `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((each) => laid(each, atom, deeper))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${laid(each, atom, deeper)}`);
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length < LONGEST_LINE && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${deeper}${part}`).join(",\n")}\n${inside}${close}`;
}

// As Python spells it; its strings are Python's already.
function pythonic(value) {
  return PYTHON.get(value) ?? JSON.stringify(value);
}

// The panel; its `show(path, body)` says what is on the screen now.
export function copying(panel) {
  let shown = { path: "", body: null };
  let kind = "curl";
  const code = element("code", { id: "copy-code" });
  const said = element("span", { class: "hint", role: "status" });
  const kinds = Object.keys(WRITERS).map((name) =>
    element("button", { type: "button", class: "quiet", "aria-pressed": name === kind, onclick: () => choose(name) }, name));
  const copy = element("button", { type: "button", class: "quiet", id: "copy-button", onclick: take }, "Copy");
  const title = element("h2", { id: "copy-title" }, "This request");
  panel.replaceChildren(
    element("div", { class: "row" }, title, element("div", { class: "segments" }, ...kinds), copy, said),
    element("pre", { tabindex: "0", "aria-label": "The request as code" }, code),
  );

  function write() {
    code.textContent = WRITERS[kind](shown.path, shown.body);
    said.textContent = "";
    for (const each of kinds) each.setAttribute("aria-pressed", String(each.textContent === kind));
  }

  function choose(name) {
    kind = name;
    write();
  }

  // Without HTTPS browsers have no clipboard for pages; what is selected can still be copied.
  async function take() {
    try {
      await navigator.clipboard.writeText(code.textContent);
      said.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(code);
      said.textContent = "Selected: copy it with the keyboard.";
    }
  }

  return (path, body = null) => {
    shown = { path, body };
    panel.hidden = false;
    write();
  };
}
