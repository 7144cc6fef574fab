/* The way to the service: one token, one kind of error.
 *
 * Rules of this file:
 * - The token is kept in this tab (sessionStorage) and goes out in a header only, never in an address.
 * - Every failure is a Problem: what happened and what to do. Whoever is refused for the token is signed out.
 */

const KEY = "sublet.token";
let token = "";
try {
  token = sessionStorage.getItem(KEY) || "";
} catch {
  /* then a reload asks for it again */
}
let onRefused = () => {};

export class Problem extends Error {
  constructor({ code = "", message = "", remedy = "", id = "", status = 0 } = {}) {
    super(message || "it did not work");
    Object.assign(this, { code, remedy, id, status });
  }
}

export function signedIn() {
  return token !== "";
}

export function signIn(text) {
  token = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch {
    /* as above */
  }
}

export function forget() {
  token = "";
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    /* nothing was kept */
  }
}

export function whenRefused(act) {
  onRefused = act;
}

/** The answer as it comes; a Problem unless it is a good one. */
export async function open(method, path, { body, signal, headers = {} } = {}) {
  const asked = token;
  const options = {
    method,
    signal,
    headers: { Authorization: `Bearer ${asked}`, ...headers },
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(new URL(path, document.baseURI), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      code: "disconnected",
      message: "the studio does not answer",
      remedy:
        "nothing was lost: sessions go on without this page. It is tried again by itself; if it lasts, ask an operator whether 'sublet serve' runs",
    });
  }
  if (answer.ok) return answer;
  const problem = await asProblem(answer);
  if (answer.status === 401 && asked === token) onRefused(problem);
  throw problem;
}

async function asProblem(answer) {
  let said = {};
  try {
    said = await answer.json();
  } catch {
    /* a proxy in between speaks no JSON */
  }
  return new Problem({
    code: String(said.code || ""),
    message: String(said.message || `the studio answered ${answer.status}`),
    remedy: String(said.remedy || ""),
    id: String(said.id || answer.headers.get("X-Request-Id") || ""),
    status: answer.status,
  });
}

export async function get(path, options) {
  const answer = await open("GET", path, options);
  return answer.json().catch(cutShort);
}

export async function send(method, path, body) {
  const answer = await open(method, path, { body });
  return answer.status === 204 ? null : answer.json();
}

function cutShort(error) {
  if (error.name === "AbortError") throw error;
  throw new Problem({ code: "disconnected", message: "the connection was cut" });
}

/** The lines of a stream as they come. Ends when the stream does. */
export async function* lines(answer, onBytes = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(cutShort);
      if (done) break;
      onBytes();
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield part.endsWith("\r") ? part.slice(0, -1) : part;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
