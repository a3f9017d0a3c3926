// One answer on the right: its figures, its picture and its threads.

import { copyOf, element, setPieces, setText } from "./dom.js";
import { drawLanes } from "./draw.js";
import { Lanes } from "./lanes.js";

const NONE = "–";
const LEAST_WIDTH = 320;
const STATES = { writing: "writing", waiting: "waiting for its threads", done: "done", stopped: "stopped" };

export class Stage {
  /** An empty stage with this title; `root` is to be put somewhere. */
  constructor(title) {
    this.root = copyOf("stage-template");
    this.lanes = new Lanes();
    this.numSteps = 0;
    this.at = null;
    this.speedup = null;
    this.isEstimate = false;
    this.showsDocument = false;
    this.#part("title").textContent = title;
    this.cards = new Map();
    this.isDue = false;
    new ResizeObserver(() => this.refresh()).observe(this.#part("picture"));
  }

  /** The answer ended early; `message` says why. */
  fail(message) {
    this.#part("note").hidden = false;
    setText(this.#part("note"), message);
    this.refresh();
  }

  /** Leaves the threads' texts to who asks for them. */
  foldWords() {
    this.#part("words").open = false;
  }

  /** Draws with the next frame, once however often it is asked. */
  refresh() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  draw() {
    const width = Math.max(LEAST_WIDTH, Math.floor(this.#part("picture").clientWidth));
    drawLanes(this.root.querySelector("svg"), this.lanes, { width, numSteps: this.numSteps, at: this.at });
    this.#drawFigures();
    this.#drawCards();
    const written = this.#part("document");
    written.hidden = !this.showsDocument;
    if (this.showsDocument) setPieces(written.lastElementChild, this.lanes.pieces());
  }

  #part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  #drawFigures() {
    const figures = this.lanes.figures();
    const about = this.isEstimate ? "≈ " : "";
    const shown = {
      tokens: figures.tokens,
      steps: figures.steps,
      threads: figures.open && !this.lanes.isOver ? `${figures.open} of ${figures.threads} open` : figures.threads,
      "per-step": fixed(figures.perStep, 2),
      "per-second": figures.perSecond === null ? NONE : about + fixed(figures.perSecond, 1),
      seconds: figures.seconds === null ? NONE : `${about}${fixed(figures.seconds, 1)} s`,
      speedup: this.speedup ?? NONE,
    };
    for (const [name, value] of Object.entries(shown)) setText(this.#part(name), String(value));
    this.#part("speedup").parentElement.hidden = this.speedup === null;
    const share = figures.dense ? figures.live / figures.dense : 0;
    this.#part("fill").style.width = `${Math.round(Math.min(1, share) * 1000) / 10}%`;
    const held = figures.held === null ? "" : `; ${figures.held} slots held`;
    const text = figures.dense
      ? `${figures.live} of ${figures.dense} dense tokens (${Math.round(share * 100)} %)${held}`
      : NONE;
    setText(this.#part("live"), text);
  }

  #drawCards() {
    const list = this.#part("cards");
    for (const name of [...this.cards.keys()].filter((known) => !this.lanes.threads.has(known))) {
      this.cards.get(name).remove();
      this.cards.delete(name);
    }
    for (const lane of this.lanes.threads.values()) {
      if (!this.cards.has(lane.name)) {
        const parts = ["card-name", "card-state", "card-text"].map((part) => element("div", { class: part }));
        this.cards.set(lane.name, list.appendChild(element("li", {}, ...parts)));
      }
      this.#drawCard(this.cards.get(lane.name), lane);
    }
  }

  #drawCard(card, lane) {
    const [name, state, text] = card.children;
    card.className = `card lane-${lane.colour}`;
    setText(name, lane.topic ? `${lane.name} · ${lane.topic}` : lane.name);
    const ended = lane.reason && lane.reason !== "stop" ? `ended: ${lane.reason}` : null;
    const { left = 0, length } = lane.passes.at(-1) ?? {};
    const block = left ? `${length - left} of ${length} places written` : null;
    setText(state, `${lane.numTokens} tokens, ${ended ?? block ?? STATES[this.lanes.stateOf(lane)]}`);
    const runs = [...lane.runs(0, lane.text.length)].map((run) => ({ ...run, lane }));
    const isWriting = ["writing", "waiting"].includes(this.lanes.stateOf(lane));
    const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 24;
    setPieces(text, isWriting ? [...runs, { cursor: lane }] : runs);
    if (isAtEnd && isWriting) text.scrollTop = text.scrollHeight;
  }
}

function fixed(number, digits) {
  return number === null ? NONE : number.toFixed(digits);
}
