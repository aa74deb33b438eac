// The request on the screen as a command for a shell and as a Python program.
//
// The code can be run unchanged. It names the variable of the key and never contains the key.

import { address, key } from "./api.js";
import { copyText, element } from "./dom.js";

const VARIABLE = "POLYHEAD_API_KEY";
const MAX_LINE_LENGTH = 80;
const PYTHON = new Map([[null, "None"], [true, "True"], [false, "False"]]);
const WRITERS = { curl: curlCommand, Python: pythonCode, openai: openaiCode };
const OPENAI_PATHS = ["/v1/systemone"]; // whose requests the client openai can send, in its own form

export function curlCommand(path, body, method = "") {
  const parts = [`curl -sS${body?.stream ? "N" : ""} ${quoteForShell(address(path))}`];
  if (method && method !== (body === null ? "GET" : "POST")) parts.push(`-X ${method}`);
  if (key()) parts.push(`-H "Authorization: Bearer $${VARIABLE}"`);
  if (body !== null) parts.push("-H 'Content-Type: application/json'", `-d ${quoteForShell(formatJson(body, JSON.stringify))}`);
  return parts.join(" \\\n  ");
}

// In single quotes a shell changes no character; only a single quote itself must be escaped.
function quoteForShell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function pythonCode(path, body) {
  const imports = [...(body?.stream ? ["import json"] : []), ...(key() ? ["import os"] : []), "", "import httpx", ""];
  if (!imports[0]) imports.shift();
  const args = [JSON.stringify(address(path))];
  if (key()) {
    imports.push(`headers = {"Authorization": f"Bearer {os.environ['${VARIABLE}']}"}`);
    args.push("headers=headers");
  }
  if (body !== null) {
    imports.push(`body = ${formatJson(body, pythonLiteral)}`);
    args.push("json=body");
  }
  args.push("timeout=60");
  return [...imports, ...(body?.stream ? streamingCall(args) : plainCall(args, body, path))].join("\n");
}

function plainCall(args, body, path) {
  const answer = path.endsWith("/metrics") ? "answer.text" : "answer.json()";
  return [`answer = httpx.${body === null ? "get" : "post"}(${args.join(", ")})`, "answer.raise_for_status()", `print(${answer})`];
}

function streamingCall(args) {
  return [
    `with httpx.stream("POST", ${args.join(", ")}) as answer:`,
    "    answer.raise_for_status()",
    "    for line in answer.iter_lines():",
    '        if line.startswith("data: ") and line != "data: [DONE]":',
    '            for choice in json.loads(line[6:])["choices"]:',
    '                print(choice.get("text") or choice.get("delta", {}).get("content") or "", end="", flush=True)',
    "print()",
  ];
}

// Its questions of yes or no do not say what counts as each.
function canUseOpenai(path, body) {
  return OPENAI_PATHS.includes(path) && !Object.values(body.questions).some(({ type, criteria }) => type === "noul" && criteria);
}

// A request with typed questions (/v1/systemone) as a call of the client openai.
function openaiCode(path, body) {
  const questions = Object.entries(body.questions).map(([name, question]) => openaiQuestion(name, question));
  const given = [["model", body.model], ["input", body.state], ["questions", questions]];
  return [
    ...(key() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address("/v1"))}, api_key=${key() ? `os.environ["${VARIABLE}"]` : '"none"'})`,
    "answer = client.decisions.create(",
    ...given.map(([name, value]) => `    ${name}=${formatJson(value, pythonLiteral, "    ")},`),
    ")",
    "for each in answer.answers:",
    "    print(each.to_dict())",
  ].join("\n");
}

function openaiQuestion(name, { type, criteria, ...rest }) {
  const choices = () => Object.entries(criteria).map(([value, description]) => ({ value, ...(description ? { description } : {}) }));
  switch (type) {
    case "choice": return { type, name, ...rest, choices: choices() };
    case "score": return { type, name, ...rest, levels: criteria.map((label) => ({ label })) };
    default: return { type: "predicate", name, ...rest };
  }
}

// JSON with short lists and objects on one line; `formatScalar` writes values that are neither lists nor objects.
function formatJson(value, formatScalar, indent = "") {
  if (value === null || typeof value !== "object") return formatScalar(value);
  const deeperIndent = `${indent}  `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((each) => formatJson(each, formatScalar, deeperIndent))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${formatJson(each, formatScalar, deeperIndent)}`);
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length < MAX_LINE_LENGTH && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${deeperIndent}${part}`).join(",\n")}\n${indent}${close}`;
}

// A JSON scalar as a Python literal; strings are the same in both.
function pythonLiteral(value) {
  return PYTHON.get(value) ?? JSON.stringify(value);
}

// Fills the panel. Returns a function that shows the request of a path and a body.
export function mountCopyPanel(panel) {
  let shown = { path: "", body: null };
  let kind = "curl";
  const code = element("code", { id: "copy-code" });
  const status = element("span", { class: "hint", role: "status" });
  const kinds = Object.keys(WRITERS).map((name) =>
    element("button", { type: "button", class: "quiet", onclick: () => chooseKind(name) }, name));
  const copy = element("button", { type: "button", class: "quiet", id: "copy-button", onclick: copyCode }, "Copy");
  const title = element("h2", { id: "copy-title" }, "This request");
  panel.replaceChildren(
    element("div", { class: "row" }, title, element("div", { class: "segments" }, ...kinds), copy, status),
    element("pre", { tabindex: "0", "aria-label": "The request as code" }, code),
  );

  function showCode() {
    const hasOpenai = canUseOpenai(shown.path, shown.body);
    const written = kind === "openai" && !hasOpenai ? "Python" : kind;
    code.textContent = WRITERS[written](shown.path, shown.body);
    status.textContent = "";
    for (const each of kinds) {
      each.setAttribute("aria-pressed", String(each.textContent === written));
      each.hidden = each.textContent === "openai" && !hasOpenai;
    }
  }

  function chooseKind(name) {
    kind = name;
    showCode();
  }

  // Where the browser permits no copying, the code is selected, so that the user can copy it.
  async function copyCode() {
    if (await copyText(code.textContent)) {
      status.textContent = "Copied.";
    } else {
      getSelection().selectAllChildren(code);
      status.textContent = "Selected: copy it with the keyboard.";
    }
  }

  return (path, body = null) => {
    shown = { path, body };
    panel.hidden = false;
    showCode();
  };
}
