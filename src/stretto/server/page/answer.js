// One request under way: its stream into lanes, and again where the server was too busy.

import { Failure, streamAnswer } from "./api.js";
import { Lanes } from "./lanes.js";

const MAX_TRIES = 6;
const DEFAULT_WAIT_S = 5;

/**
 * Asks and fills `stage` as the answer comes; returns {text, reason, details, events, failure}.
 *
 * `onNews()` is called after each chunk. `onBusy(seconds, message)` is called before each wait for
 * a server that is too busy, and resolves once to try again. A failure or stop is returned with
 * what had come: `failure` is a `Failure`, or "stopped".
 */
export async function answer({ path, body, key, signal, stage, onNews, onBusy }) {
  for (let tries = 1; ; tries += 1) {
    const found = { text: "", reason: null, details: null, events: [], failure: null };
    stage.lanes = new Lanes();
    try {
      await follow(streamAnswer(path, body, { key, signal }), found, stage, onNews);
    } catch (error) {
      found.failure = error.name === "AbortError" ? "stopped" : error;
      if (found.failure === error && !(error instanceof Failure)) console.error(error);
    }
    stage.lanes.isOver = true;
    const isBusy = found.failure instanceof Failure && found.failure.kind === "busy";
    if (!isBusy || tries >= MAX_TRIES) return found;
    await onBusy(found.failure.retryAfterS ?? DEFAULT_WAIT_S, found.failure.message);
    if (signal.aborted) return { ...found, failure: "stopped" };
  }
}

async function follow(chunks, found, stage, onNews) {
  for await (const chunk of chunks) {
    for (const event of chunk.stretto?.events ?? []) {
      found.events.push(event);
      stage.lanes.take(event);
    }
    found.details = chunk.stretto?.details ?? found.details;
    const choice = chunk.choices[0];
    found.text += choice?.delta?.content ?? choice?.text ?? "";
    found.reason = choice?.finish_reason ?? found.reason;
    stage.refresh();
    onNews();
  }
}

/** Resolves after so many seconds, at `signal`'s abort, or when `hurry` is called. */
export function pause(seconds, signal) {
  let hurry;
  const over = new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    hurry = () => {
      clearTimeout(timer);
      resolve();
    };
    signal.addEventListener("abort", hurry, { once: true });
  });
  return { over, hurry };
}
