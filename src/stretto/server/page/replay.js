// Playing an answer again: from its events to any step, with a scrubber.

import { byId, setText } from "./dom.js";
import { Lanes } from "./lanes.js";

const FRAME_MS = 50;
const SECONDS_IN_ALL = 12;

/** The scrubber below a stage. `open` takes an answer's events, `close` hides it. */
export class Player {
  constructor() {
    this.root = byId("player");
    this.scrubber = byId("scrubber");
    this.button = byId("play");
    this.stage = null;
    this.timer = null;
    this.scrubber.addEventListener("input", () => {
      this.pause();
      this.seek(Number(this.scrubber.value));
    });
    this.button.addEventListener("click", () => (this.timer === null ? this.play() : this.pause()));
  }

  /** Shows `events` on `stage`, from their end. */
  open(stage, events) {
    this.pause();
    this.stage = stage;
    this.events = events;
    const steps = events.filter((event) => event.type === "step").map((event) => event.step);
    this.numSteps = steps.at(-1) ?? 0;
    stage.numSteps = Math.max(stage.numSteps, this.numSteps);
    this.scrubber.max = String(this.numSteps);
    this.root.hidden = this.numSteps === 0;
    this.seek(this.numSteps);
  }

  close() {
    this.pause();
    this.root.hidden = true;
    this.stage = null;
  }

  /** Shows the answer as it was after a step; after the last one, its end as well. */
  seek(step) {
    const isForward = this.stage.at !== null && step >= this.step && this.lanes === this.stage.lanes;
    if (!isForward) {
      this.lanes = this.stage.lanes = new Lanes();
      this.next = 0;
    }
    this.step = step;
    const isLast = step >= this.numSteps;
    while (this.next < this.events.length && (isLast || !isAfter(this.events[this.next], step))) {
      this.lanes.take(this.events[this.next]);
      this.next += 1;
    }
    this.lanes.isOver = isLast;
    this.stage.at = isLast ? null : step;
    this.scrubber.value = String(step);
    const text = `step ${step} of ${this.numSteps}`;
    this.scrubber.setAttribute("aria-valuetext", text);
    setText(byId("at"), text);
    this.stage.refresh();
  }

  play() {
    if (this.step >= this.numSteps) this.seek(0);
    const perFrame = this.numSteps / ((SECONDS_IN_ALL * 1000) / FRAME_MS);
    let place = this.step;
    setText(this.button, "Pause");
    this.timer = setInterval(() => {
      place += Math.max(0.1, perFrame * Number(byId("speed").value));
      this.seek(Math.min(this.numSteps, Math.floor(place)));
      if (this.step >= this.numSteps) this.pause();
    }, FRAME_MS);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    setText(this.button, "Play");
  }
}

/** Whether an event belongs to a later step. Those without one belong to where they stand. */
function isAfter(event, step) {
  if (event.type === "usage" || event.type === "done" || event.type === "error") return true;
  return typeof event.step === "number" && event.step > step;
}
