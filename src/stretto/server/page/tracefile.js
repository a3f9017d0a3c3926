// The file that `stretto run --trace FILE` writes, as events that can be played.

const FORMAT = "stretto-trace";
const VERSION = 1;
const MAX_BYTES = 256 * 2 ** 20;
const FIELDS = {
  thread_start: { thread: "string", at: "number", step: "number" },
  token: { thread: "string", text: "string", origin: "string", step: "number" },
  thread_end: { thread: "string", reason: "string", text: "string" },
  join: { thread: "string", children: "array", step: "number" },
  evict: { thread: "string", segment: "number", step: "number" },
  denoise: { thread: "string", length: "number", indices: "array", num_left: "number", step: "number" },
  done: { text: "string" },
};

/** A file that is no trace; its message says why, for the person who chose it. */
export class TraceError extends Error {}

/** Reads a file that was dropped or chosen: {title, events}. Throws `TraceError`. */
export async function readTraceFile(file) {
  if (file.size > MAX_BYTES) throw new TraceError("it is larger than 256 MiB");
  return readTrace(await file.text(), file.name);
}

/** The trace in a text: {title, events}, with a `step` event after each step. */
export function readTrace(text, name) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new TraceError("it is not JSON");
  }
  if (found?.format !== FORMAT) {
    throw new TraceError("it is JSON, but not what “stretto run --trace FILE” writes");
  }
  if (found.version !== VERSION) {
    throw new TraceError(`its version is ${found.version}; this page reads version ${VERSION}`);
  }
  checkEvents(found.events);
  checkSegments(found.segments);
  return { title: [name, found.method, found.model].filter(Boolean).join(" · "), events: withSteps(found) };
}

function checkEvents(events) {
  if (!Array.isArray(events) || events.length === 0) throw new TraceError("it has no events");
  const threads = new Set();
  events.forEach((event, number) => {
    const where = `event ${number + 1}`;
    if (typeof event?.type !== "string") throw new TraceError(`${where} has no type`);
    for (const [field, kind] of Object.entries(FIELDS[event.type] ?? {})) {
      if (kindOf(event[field]) !== kind) throw new TraceError(`${where} (${event.type}) has a bad ${field}`);
    }
    if (event.type === "thread_start") {
      const isRoot = event.parent === null && threads.size === 0;
      const isFresh = !threads.has(event.thread) && (isRoot || threads.has(event.parent));
      if (!isFresh) throw new TraceError(`${where} forks ${event.thread} from nowhere`);
      threads.add(event.thread);
    }
    for (const thread of [event.thread, ...(event.type === "join" ? event.children : [])]) {
      if (thread !== undefined && !threads.has(thread)) {
        throw new TraceError(`${where} is of thread ${thread}, which has not begun`);
      }
    }
  });
}

function kindOf(value) {
  return Array.isArray(value) ? "array" : typeof value;
}

function checkSegments(segments) {
  const isWhole = (s) =>
    [s?.sees, s?.tokens, s?.steps].every(Array.isArray) && s.sees.every((id) => segments[id]?.tokens);
  if (!Array.isArray(segments) || !segments.every(isWhole)) {
    throw new TraceError("its segments are incomplete");
  }
}

/** The events with a `step` event after the last one of each step. */
function withSteps(document) {
  const { events } = document;
  const live = liveByStep(document.segments);
  const numSteps = Math.max(0, ...live.keys());
  let numPlaced = document.segments
    .filter((s) => s.role === "prompt")
    .reduce((sum, s) => sum + s.tokens.length, 0);
  const found = [];
  let current = 0;
  const close = (next) => {
    for (; current < next; current += 1) {
      if (current > 0) {
        const time_s = timeOf(current, numSteps, document.timing);
        found.push({ type: "step", step: current, time_s, live: live.get(current) ?? {}, dense_tokens: numPlaced });
      }
    }
  };
  for (const event of events) {
    if (typeof event.step === "number") close(event.step);
    else if (event.type === "usage" || event.type === "done") close(numSteps + 1);
    numPlaced += event.type === "token";
    found.push(event);
  }
  close(numSteps + 1);
  return found;
}

/** Of each step, how many tokens the one that each thread placed then sees, itself included. */
function liveByStep(segments) {
  const found = new Map();
  const ends = segments.map((segment) => segment.steps.reduce((a, b) => Math.max(a, b ?? 0), 0));
  for (const segment of segments) {
    const seen = segment.sees.reduce((sum, id) => sum + segments[id].tokens.length, 0);
    const begins = segment.sees.reduce((last, id) => Math.max(last, ends[id]), 0);
    segment.steps.forEach((drawn, index) => {
      if (drawn === null) return;
      const step = Math.max(drawn, begins); // what is drawn before a wait is placed after it
      const own = segment.kind === "block" ? segment.tokens.length : index + 1;
      if (!found.has(step)) found.set(step, {});
      const threads = found.get(step);
      threads[segment.thread] = Math.max(threads[segment.thread] ?? 0, seen + own);
    });
  }
  return found;
}

/** A file has the times of the first and the last token; steps between are spread evenly. */
function timeOf(step, numSteps, timing) {
  const { ttft_s = 0, decode_s = 0 } = timing ?? {};
  return ttft_s + (numSteps > 1 ? ((step - 1) / (numSteps - 1)) * decode_s : 0);
}
