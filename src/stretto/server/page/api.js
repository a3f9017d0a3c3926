// Talking to the server: the model's card, and an answer as a stream of chunks.

/** Why there is no answer, or no whole one. `kind` says what can be done about it. */
export class Failure extends Error {
  /** @param {"key"|"busy"|"late"|"ending"|"gone"|"cut"|"refused"|"failed"} kind */
  constructor(kind, message, retryAfterS = null) {
    super(message);
    this.kind = kind;
    this.retryAfterS = retryAfterS;
  }
}

const KINDS = { 401: "key", 429: "busy", 503: "ending", 504: "late" };
const GONE = "The server does not answer. Is it still running?";
const CUT = "The connection broke before the answer was whole.";

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The card of the one model that is served. Throws `Failure`. */
export async function readModel(key) {
  const response = await reach("v1/models", { headers: headersOf(key) });
  const body = await response.json();
  return body.data[0];
}

/** Yields the chunks of an answer as they come. Throws `Failure`; an abort throws `AbortError`. */
export async function* streamAnswer(path, body, { key, signal }) {
  const headers = { "Content-Type": "application/json", ...headersOf(key) };
  const response = await reach(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw ofError(statusOf(chunk.error), chunk.error);
    yield chunk;
  }
  throw new Failure("cut", CUT);
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("gone", GONE);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw ofError(response.status, body.error ?? {}, response.headers.get("Retry-After"));
}

/** In a stream an error has no status but its code. */
function statusOf({ code }) {
  return { deadline_exceeded: 504, shutting_down: 503, queue_full: 429 }[code] ?? 500;
}

function ofError(status, { message = `The server answered with status ${status}.` }, after = null) {
  const kind = KINDS[status] ?? (status < 500 ? "refused" : "failed");
  const seconds = Number.parseInt(after ?? "", 10);
  return new Failure(kind, sentence(message), Number.isFinite(seconds) ? seconds : null);
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** The data of server-sent events, whatever the pieces in which their bytes come. */
async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice("data: ".length);
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("cut", CUT);
  } finally {
    reader.cancel().catch(() => {});
  }
}
