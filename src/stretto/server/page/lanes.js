// Threads as they write: events in, lanes out. Pure: no document, no clock.

/** How many colours forked threads take in turn; main has one of its own. */
export const NUM_COLOURS = 7;

/** One thread: what it wrote, when, and what it no longer sees. */
class Lane {
  constructor({ thread, parent, topic, step }, number) {
    this.name = thread;
    this.parent = parent;
    this.topic = topic;
    this.colour = parent === null ? "main" : String((number - 1) % NUM_COLOURS);
    this.startStep = step;
    this.lastStep = step;
    this.text = "";
    this.begins = []; // {start, segment}: where in the text a segment begins
    this.cells = []; // {step, count, markup, segment}: tokens drawn at a step
    this.children = []; // {at, name}: forked at so many characters of the text
    this.gone = new Set(); // segments that this thread no longer sees
    this.passes = []; // {step, left, length}: of a block, after each pass that wrote some of it
    this.numTokens = 0;
    this.reason = null;
  }

  get isOpen() {
    return this.reason === null;
  }

  /** Whether it is a block: its tokens come at its end, and were counted pass by pass. */
  get isBlock() {
    return this.passes.length > 0;
  }

  write(text, segment) {
    if (!text) return;
    if (segment !== undefined && this.begins.at(-1)?.segment !== segment) {
      this.begins.push({ start: this.text.length, segment });
    }
    this.text += text;
  }

  draw({ step, markup, segment }) {
    const last = this.cells.at(-1);
    if (last?.step === step && last.markup === markup && last.segment === segment) last.count += 1;
    else this.cells.push({ step, count: 1, markup, segment });
    this.lastStep = Math.max(this.lastStep, step);
    this.numTokens += 1;
  }

  /** The text from `start` to `end` in runs, each of them seen by the thread or gone. */
  *runs(start, end) {
    const bounds = [{ start: 0, segment: null }, ...this.begins, { start: this.text.length }];
    for (let i = 0; i + 1 < bounds.length; i += 1) {
      const text = this.text.slice(Math.max(start, bounds[i].start), Math.min(end, bounds[i + 1].start));
      if (text) yield { text, isGone: this.gone.has(bounds[i].segment) };
    }
  }
}

/** One answer as its events tell it. */
export class Lanes {
  constructor() {
    this.threads = new Map(); // name -> Lane, in the order in which they began
    this.marks = []; // {kind: fork | join | evict, thread, other, step}
    this.steps = []; // {step, timeS, live, dense, held}
    this.numTokens = 0;
    this.numText = 0;
    this.numSteps = 0;
    this.lastDrawn = 0; // the last step at which a token was drawn that stands in the answer
    this.done = null; // {text, finish_reason}
    this.failure = null;
    this.isOver = false; // nothing more will come, done or not
  }

  /** Takes the next event. One of a type that is not known changes nothing. */
  take(event) {
    TAKE[event.type]?.(this, event);
  }

  /** A token was drawn at a step. */
  drawn(step) {
    this.lastDrawn = Math.max(this.lastDrawn, step);
    this.numSteps = Math.max(this.numSteps, step);
  }

  get numOpen() {
    let count = 0;
    for (const lane of this.threads.values()) count += lane.isOpen;
    return count;
  }

  /** `writing`, `waiting` for its children, `done`, or `stopped` before it was. */
  stateOf(lane) {
    if (!lane.isOpen || this.done) return "done";
    if (this.isOver) return "stopped";
    const waits = lane.children.some(({ name }) => this.threads.get(name).isOpen);
    return waits && lane.lastStep < this.numSteps - 1 ? "waiting" : "writing";
  }

  /** The answer in document order: {text, lane, isGone}, and {cursor: lane} where one writes. */
  *pieces() {
    const [first] = this.threads.values();
    if (!first) return;
    if (!this.done) {
      yield* this.#piecesOf(first);
      return;
    }
    let left = this.done.text.length;
    const written = [...this.#piecesOf(first)].filter((piece) => piece.text);
    if (!written.map(({ text }) => text).join("").startsWith(this.done.text)) {
      yield { text: this.done.text, lane: first, isGone: false };
      return;
    }
    for (const piece of written) {
      const text = piece.text.slice(0, left);
      left -= text.length;
      if (text) yield { ...piece, text, isGone: false };
    }
  }

  *#piecesOf(lane) {
    let start = 0;
    let before = null;
    for (const { at, name } of lane.children) {
      const end = unitsOf(lane.text, at);
      for (const run of lane.runs(start, end)) yield { ...run, lane };
      if (before?.isOpen && start === end) yield { text: "\n", lane, isGone: false };
      start = end;
      before = this.threads.get(name);
      yield* this.#piecesOf(before);
    }
    for (const run of lane.runs(start, lane.text.length)) yield { ...run, lane };
    if (lane.isOpen && !this.isOver) yield { cursor: lane };
  }

  /** What is counted so far; null where it is not known. */
  figures() {
    const last = this.steps.at(-1);
    const first = this.steps[0];
    const seen = this.steps.findLast((step) => Object.keys(step.live).length > 0);
    const spanS = last ? last.timeS - first.timeS : 0;
    return {
      tokens: this.numTokens,
      steps: this.lastDrawn,
      threads: this.threads.size,
      open: this.numOpen,
      perStep: this.lastDrawn ? this.numText / this.lastDrawn : null,
      perSecond: spanS > 0 ? (this.numTokens - first.tokens) / spanS : null,
      seconds: last?.timeS ?? null,
      decodeS: spanS,
      live: seen ? Math.max(...Object.values(seen.live)) : null,
      dense: seen?.dense ?? null,
      held: seen?.held ?? null,
    };
  }
}

const TAKE = {
  thread_start(lanes, event) {
    const lane = new Lane(event, lanes.threads.size);
    lanes.threads.set(lane.name, lane);
    if (lane.parent === null) return;
    lanes.threads.get(lane.parent).children.push({ at: event.at, name: lane.name });
    lanes.marks.push({ kind: "fork", thread: lane.parent, other: lane.name, step: event.step });
  },
  token(lanes, event) {
    const lane = lanes.threads.get(event.thread);
    lane.write(event.text, event.segment);
    if (event.origin !== "sampled" && event.origin !== "forced") return;
    lanes.numText += !event.markup;
    if (lane.isBlock) return;
    lane.draw(event);
    lanes.numTokens += 1;
    lanes.drawn(event.step);
  },
  thread_end(lanes, event) {
    const lane = lanes.threads.get(event.thread);
    lane.write(event.text);
    lane.reason = event.reason;
  },
  join(lanes, { thread, children, step }) {
    for (const other of children) lanes.marks.push({ kind: "join", thread, other, step });
  },
  evict(lanes, { thread, segment, step }) {
    lanes.threads.get(thread).gone.add(segment);
    lanes.marks.push({ kind: "evict", thread, step });
  },
  denoise(lanes, { thread, step, length, indices, num_left: left }) {
    const lane = lanes.threads.get(thread);
    lane.passes.push({ step, left, length });
    lane.lastStep = Math.max(lane.lastStep, step);
    lane.numTokens += indices.length;
    lanes.numTokens += indices.length;
    if (indices.length) lanes.drawn(step);
  },
  step(lanes, event) {
    lanes.numSteps = Math.max(lanes.numSteps, event.step);
    lanes.steps.push({
      step: event.step,
      timeS: event.time_s,
      live: event.live,
      dense: event.dense_tokens,
      held: event.held_slots ?? null,
      tokens: lanes.numTokens,
    });
  },
  done(lanes, event) {
    lanes.done = event;
  },
  error(lanes, event) {
    lanes.failure = event.message;
  },
};

/** The length in UTF-16 units of the first `points` code points of a text. */
function unitsOf(text, points) {
  let units = 0;
  for (const character of text) {
    if (points <= 0) break;
    points -= 1;
    units += character.length;
  }
  return units;
}
