// The way to the server: requests, streams of events, and the key.
//
// Knows no task.  The one idea: an error is what the server says of it, a sentence that the page shows as it is.

const KEY = "polyhead-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function remember(given) {
  if (given) sessionStorage.setItem(KEY, given);
  else sessionStorage.removeItem(KEY);
}

// Of a path of the API; the page may lie below a prefix that a proxy takes away.
export function address(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI.replace(/[?#].*$/, "")).href;
}

// The answer as JSON: a GET without a body, a POST with one, unless `method` says otherwise.
export async function request(path, body = null, options = {}) {
  const answer = await called(path, body, options);
  return answer.json();
}

export async function text(path, options = {}) {
  const answer = await called(path, null, { accept: "text/plain", ...options });
  return answer.text();
}

// How far each model is.  What is not ready says so with a 503, which is an answer all the same.
export async function readiness() {
  const answer = await fetch(address("/readyz"), { cache: "no-store" });
  return (await answer.json()).models ?? {};
}

// The JSON of server-sent events, one by one, as they come.
export async function* events(path, body, signal) {
  const answer = await called(path, body, { signal, accept: "text/event-stream" });
  let left = "";
  for await (const piece of pieces(answer.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (left + piece).split("\n");
    left = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      yield checked(JSON.parse(line.slice(6)));
    }
  }
}

async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) yield value;
  } finally {
    await reader.cancel().catch(() => {}); // it was closed by whoever stopped it
  }
}

// An error may come when the answer has begun.
function checked(event) {
  if (event.error) throw new ApiError(sentence(event, "the server ended the answer"), 0);
  return event;
}

async function called(path, body, { signal, method, accept = "application/json", as = key() } = {}) {
  const headers = { Accept: accept };
  if (body !== null) headers["Content-Type"] = "application/json";
  if (as) headers.Authorization = `Bearer ${as}`;
  const verb = method ?? (body === null ? "GET" : "POST");
  let answer;
  try {
    answer = await fetch(address(path), {
      method: verb, headers, signal, body: body === null ? undefined : JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!answer.ok) throw new ApiError(await told(answer), answer.status);
  return answer;
}

async function told(answer) {
  const content = await answer.text();
  const plain = `The server answered ${answer.status}.`;
  try {
    return sentence(JSON.parse(content), plain);
  } catch {
    return plain;
  }
}

// Each dialect has its own shape for one.
function sentence(said, otherwise) {
  return said.error?.message ?? said.message ?? (typeof said.error === "string" ? said.error : otherwise);
}
