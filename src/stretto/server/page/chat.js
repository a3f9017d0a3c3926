// The conversation on the left: what was asked, the answers as they fill in, and what went wrong.

import { byId, copyOf, element, setPieces, setText } from "./dom.js";

const CUT_SHORT = "The answer reached its token limit.";

/** A question and its answer. `history` of the chat has it once there is something to have. */
export class Turn {
  constructor(question) {
    this.question = question;
    this.answer = null;
    this.events = [];
    this.root = copyOf("turn-template");
    setText(this.#part("question"), question);
    this.#part("answer").setAttribute("aria-busy", "true");
  }

  /** Shows the answer so far. */
  show(lanes) {
    setPieces(this.#part("answer"), lanes.pieces());
  }

  /** The answer is whole, or as whole as it gets; `text` is what later questions build on. */
  finish(text, lanes, { reason, note = null }) {
    this.answer = text;
    this.#part("answer").setAttribute("aria-busy", "false");
    if (lanes.done) this.show(lanes);
    else setText(this.#part("answer"), text);
    const shown = note ?? (reason === "length" ? CUT_SHORT : null);
    this.tell(shown, []);
  }

  /** A line below the answer with buttons, [[label, action], …]; null takes it away. */
  tell(message, actions, { isAlert = false } = {}) {
    const note = this.#part("note");
    note.hidden = message === null;
    const text = element("span", isAlert ? { role: "alert" } : {}, message ?? "");
    note.replaceChildren(text, ...actions.map(([label, action]) => button(label, action)));
  }

  offer(label, action) {
    this.#part("actions").replaceChildren(button(label, action));
  }

  #part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }
}

function button(label, action) {
  const made = element("button", { type: "button" }, label);
  made.addEventListener("click", action);
  return made;
}

/** All turns, and the form below them. */
export class Chat {
  constructor({ onAsk, onStop }) {
    this.turns = [];
    this.field = byId("question");
    this.isAsking = false;
    const ask = () => {
      const question = this.field.value.trim();
      if (!question || this.isAsking) return;
      this.field.value = "";
      onAsk(question);
    };
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      ask();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      ask();
    });
    byId("stop").addEventListener("click", onStop);
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isAsking) onStop();
    });
    byId("clear").addEventListener("click", () => this.clear());
  }

  /** A new turn at the end. */
  begin(question) {
    const turn = new Turn(question);
    this.turns.push(turn);
    byId("transcript").append(turn.root);
    byId("empty").hidden = true;
    this.setAsking(true);
    turn.root.scrollIntoView({ block: "nearest" });
    return turn;
  }

  /** The messages of a request: all turns that have an answer, and then this question. */
  messages(turn, system) {
    const told = this.turns.filter((known) => known !== turn && known.answer);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...told.flatMap(({ question, answer }) => [
        { role: "user", content: question },
        { role: "assistant", content: answer },
      ]),
      { role: "user", content: turn.question },
    ];
  }

  /** Takes a turn away, so that it can be asked anew. */
  remove(turn) {
    this.turns = this.turns.filter((known) => known !== turn);
    turn.root.remove();
  }

  clear() {
    if (this.isAsking) return;
    this.turns = [];
    byId("transcript").replaceChildren();
    byId("empty").hidden = false;
    this.field.focus();
  }

  setAsking(isAsking) {
    const stop = byId("stop");
    const hadFocus = document.activeElement === stop;
    this.isAsking = isAsking;
    byId("send").hidden = isAsking;
    stop.hidden = !isAsking;
    byId("clear").disabled = isAsking;
    if (hadFocus && !isAsking) this.field.focus();
  }

  /** Keeps the end in view, unless its reader has scrolled up. */
  follow() {
    const box = byId("transcript");
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
  }
}
