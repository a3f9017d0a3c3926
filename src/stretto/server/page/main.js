// The page: the chat on the left, threads on the right, and how they hang together.

import { answer, pause } from "./answer.js";
import { readModel } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Player } from "./replay.js";
import { chosenMethod, offerMethods, readSettings, saveKey, savedKey, systemMessage } from "./settings.js";
import { Stage } from "./stage.js";
import { TraceError, readTraceFile } from "./tracefile.js";

const LATE = "Ask for fewer tokens, or try again.";
let model = null;
let stopping = null;
const player = new Player();
const chat = new Chat({ onAsk: (question) => ask(chat.begin(question)), onStop: () => stopping?.abort() });

// -- the model ---------------------------------------------------------------------------------

async function connect() {
  try {
    model = await readModel(savedKey());
  } catch (failure) {
    refuse(failure);
    return;
  }
  byId("key-form").hidden = true;
  byId("banner").hidden = true;
  setText(byId("model"), model.id);
  setText(byId("mode"), model.stretto.has_chat_template ? "" : "This model continues text; it knows no turns.");
  offerMethods(model);
  byId("send").disabled = false;
}

/** Says why there is no model yet, and what to do. */
function refuse(failure) {
  byId("send").disabled = true;
  const wantsKey = failure.kind === "key";
  byId("key-form").hidden = !wantsKey;
  byId("reconnect").hidden = wantsKey;
  byId("banner").hidden = false;
  const text = wantsKey ? "This server wants a key." : failure.message;
  setText(byId("banner-text"), wantsKey && savedKey() ? `${failure.message}` : text);
  if (wantsKey) byId("key").focus();
}

byId("reconnect").addEventListener("click", connect);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value.trim());
  byId("key").value = "";
  connect().then(() => !byId("send").disabled && byId("question").focus());
});

// -- asking ------------------------------------------------------------------------------------

async function ask(turn) {
  stopping = new AbortController();
  const stage = new Stage(chosenMethod(model));
  const beside = byId("compare").checked ? new Stage("sequential, beside it") : null;
  if (beside) pair(stage, beside);
  showStages(stage, beside);
  say("Answering.");
  const news = () => {
    if (beside) align(stage, beside);
    follow(turn, stage);
  };
  const runs = [run(turn, stage, null, news)];
  if (beside) runs.push(run(turn, beside, "sequential", () => align(stage, beside)));
  for (const each of runs) each.then(() => compare(stage, beside));
  const found = await runs[0];
  conclude(turn, stage, found);
  const other = await runs[1];
  if (other?.failure instanceof Error) beside.fail(other.failure.message);
  if (beside) align(stage, beside);
  if (stage.root.isConnected && found.events.some((event) => event.type === "step")) {
    player.open(stage, found.events);
  }
  chat.setAsking(false);
}

/** One request of a turn, for its stage. */
function run(turn, stage, method, onNews) {
  const isChat = model.stretto.has_chat_template;
  const asked = isChat ? { messages: chat.messages(turn, systemMessage()) } : { prompt: turn.question };
  return answer({
    path: isChat ? "v1/chat/completions" : "v1/completions",
    body: { model: model.id, ...asked, ...readSettings(method) },
    key: savedKey(),
    signal: stopping.signal,
    stage,
    onNews,
    onBusy: (seconds, message) => waitFor(turn, seconds, message),
  });
}

let shownOpen = 1;
let dueTurn = null;

function follow(turn, stage) {
  const { numOpen } = stage.lanes;
  if (numOpen > 1 && shownOpen <= 1) say("Several threads are writing.");
  shownOpen = numOpen;
  if (dueTurn) return;
  dueTurn = turn;
  requestAnimationFrame(() => {
    dueTurn = null;
    if (turn.answer === null) turn.show(stage.lanes);
    chat.follow();
  });
}

async function waitFor(turn, seconds, message) {
  const { over, hurry } = pause(seconds, stopping.signal);
  const text = `The server is busy. Trying again in ${seconds} s. (${message})`;
  turn.tell(text, [["Try now", hurry]], { isAlert: true });
  await over;
  turn.tell(null, []);
}

/** The end of a turn, good or bad. */
function conclude(turn, stage, { text, reason, events, failure }) {
  turn.events = events;
  const { lanes } = stage;
  stage.refresh();
  const tries = [["Try again", () => again(turn)]];
  if (failure === null) {
    turn.finish(lanes.done?.text ?? text, lanes, { reason });
    say(`The answer is complete: ${lanes.numTokens} tokens in ${lanes.numSteps} steps.`);
  } else if (failure === "stopped") {
    turn.finish(text, lanes, { reason, note: "Stopped." });
    say("Stopped.");
  } else {
    turn.finish(text, lanes, { reason });
    const hint = failure.kind === "late" ? ` ${LATE}` : "";
    turn.tell(`${failure.message ?? failure}${hint}`, tries, { isAlert: true });
    if (failure.kind === "key") refuse(failure);
  }
  if (events.some((event) => event.type === "step")) {
    turn.offer("Show its threads", () => replay(turn.question, events));
  }
  chat.follow();
}

async function again(turn) {
  if (chat.isAsking) return;
  await connect();
  if (byId("send").disabled) return;
  chat.remove(turn);
  ask(chat.begin(turn.question));
}

/** Two stages that are compared show their pictures first, over the same steps. */
function pair(...stages) {
  for (const stage of stages) stage.foldWords();
}

function align(...stages) {
  const numSteps = Math.max(...stages.map((stage) => stage.lanes.numSteps));
  for (const stage of stages) {
    if (stage.numSteps === numSteps) continue;
    stage.numSteps = numSteps;
    stage.refresh();
  }
}

/** Steps and seconds of the answer against the sequential one, once both are there. */
function compare(stage, beside) {
  if (!beside?.lanes.done || !stage.lanes.done) return;
  const [own, other] = [stage.lanes.figures(), beside.lanes.figures()];
  const steps = other.steps / own.steps;
  const seconds = other.decodeS / own.decodeS;
  stage.speedup = `${steps.toFixed(2)}× in steps, ${seconds.toFixed(2)}× in time (both decoded at once)`;
  stage.refresh();
}

// -- stages and files --------------------------------------------------------------------------

function showStages(...stages) {
  player.close();
  byId("stages").replaceChildren(...stages.filter(Boolean).map((stage) => stage.root));
  byId("hint").hidden = true;
  for (const stage of stages) stage?.refresh();
}

function replay(title, events, { isFile = false } = {}) {
  const stage = new Stage(title);
  stage.showsDocument = isFile;
  stage.isEstimate = isFile;
  showStages(stage);
  player.open(stage, events);
  byId("play").focus();
}

async function openFile(file) {
  if (!file) return;
  const problem = byId("file-problem");
  problem.hidden = true;
  try {
    const { title, events } = await readTraceFile(file);
    if (chat.isAsking) stopping.abort();
    replay(title, events, { isFile: true });
    say(`${file.name} is open.`);
  } catch (error) {
    if (!(error instanceof TraceError)) throw error;
    problem.hidden = false;
    setText(problem, `${file.name} cannot be replayed: ${error.message}.`);
  }
}

byId("file").addEventListener("change", (event) => {
  openFile(event.target.files[0]);
  event.target.value = "";
});
window.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
window.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) document.body.classList.remove("dropping");
});
window.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  openFile(event.dataTransfer.files[0]);
});

/** One short line for screen readers. */
function say(text) {
  setText(byId("status"), text);
}

connect();
