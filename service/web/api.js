// HTTP requests to the server, streams of server-sent events, and the stored API key.
//
// The message of an error is the sentence of the server's answer; the page shows it unchanged.

const STORAGE_KEY = "polyhead-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(STORAGE_KEY) ?? "";
}

export function storeKey(value) {
  if (value) sessionStorage.setItem(STORAGE_KEY, value);
  else sessionStorage.removeItem(STORAGE_KEY);
}

// The URL of a path of the API. The page may be served below a prefix that a proxy removes.
export function address(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI.replace(/[?#].*$/, "")).href;
}

// The answer as JSON. The method is GET without a body and POST with one, unless `method` is given.
export async function request(path, body = null, options = {}) {
  const answer = await send(path, body, options);
  return answer.json();
}

export async function text(path, options = {}) {
  const answer = await send(path, null, { accept: "text/plain", ...options });
  return answer.text();
}

// The state of each model. The status 503 of a server that is not ready is no error here.
export async function readiness() {
  const answer = await fetch(address("/readyz"), { cache: "no-store" });
  return (await answer.json()).models ?? {};
}

// The JSON of server-sent events, one by one, as they arrive.
export async function* events(path, body, signal) {
  const answer = await send(path, body, { signal, accept: "text/event-stream" });
  let left = "";
  for await (const chunk of readChunks(answer.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (left + chunk).split("\n");
    left = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      yield checkEvent(JSON.parse(line.slice(6)));
    }
  }
}

async function* readChunks(stream) {
  const reader = stream.getReader();
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) yield value;
  } finally {
    await reader.cancel().catch(() => {}); // an aborted request has closed it already
  }
}

// An error may be sent after the answer has begun.
function checkEvent(event) {
  if (event.error) throw new ApiError(errorMessage(event, "the server ended the answer"), 0);
  return event;
}

async function send(path, body, { signal, method, accept = "application/json", apiKey = key() } = {}) {
  const headers = { Accept: accept };
  if (body !== null) headers["Content-Type"] = "application/json";
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
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
  if (!answer.ok) throw new ApiError(await readError(answer), answer.status);
  return answer;
}

async function readError(answer) {
  const content = await answer.text();
  const fallback = `The server answered ${answer.status}.`;
  try {
    return errorMessage(JSON.parse(content), fallback);
  } catch {
    return fallback;
  }
}

// The message of an error; each dialect has its own form of it.
function errorMessage(content, fallback) {
  return content.error?.message ?? content.message ?? (typeof content.error === "string" ? content.error : fallback);
}
