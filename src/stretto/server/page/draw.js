// Lanes as a picture: a row a thread, a column a step; below them what is seen against dense.

import { svgElement } from "./dom.js";

const LABEL_WIDTH = 132;
const LABEL_LETTERS = 17;
const RIGHT = 10;
const TOP = 8;
const ROW = 28;
const CELL = 14;
const CHART = 46;
const AXIS = 18;
const WIDEST = 14;
const LEAST_STEPS = 24;
/** Narrower cells have no gap between them. */
const GAP_FROM = 3.5;

/**
 * Draws `lanes` into an <svg> that is `width` pixels wide. `numSteps`: what the axis must hold at
 * least; `at`: the step of the scrubber, if there is one.
 */
export function drawLanes(svg, lanes, { width, numSteps = 0, at = null }) {
  const rows = [...lanes.threads.values()];
  const frame = frameOf(rows, Math.max(numSteps, lanes.numSteps), width);
  const parts = [axis(frame)];
  for (const lane of rows) parts.push(row(frame, lanes, lane));
  for (const lane of rows) parts.push(...marks(frame, lanes, lane));
  parts.push(...chart(frame, lanes.steps));
  if (at !== null) parts.push(path("playhead", `M${frame.x(at)} 0V${frame.bottom}`));
  svg.setAttribute("viewBox", `0 0 ${width} ${frame.height}`);
  svg.setAttribute("height", frame.height);
  svg.setAttribute("aria-label", inWords(lanes, rows));
  svg.replaceChildren(...parts);
}

/** Where things stand: `x(step)` is the right edge of a step, `y(lane)` the middle of a row. */
function frameOf(rows, steps, width) {
  const numSteps = Math.max(LEAST_STEPS, Math.ceil(steps / 12) * 12);
  const unit = Math.min(WIDEST, (width - LABEL_WIDTH - RIGHT) / numSteps);
  const order = new Map(rows.map((lane, index) => [lane.name, index]));
  const chartTop = TOP + Math.max(1, rows.length) * ROW + 6;
  const bottom = chartTop + CHART;
  return {
    unit,
    numSteps,
    chartTop,
    bottom,
    height: bottom + AXIS,
    x: (step) => round(LABEL_WIDTH + step * unit),
    y: (name) => TOP + order.get(name) * ROW + ROW / 2,
  };
}

function path(name, d) {
  return svgElement("path", { class: name, d });
}

function label(name, x, y, text) {
  return svgElement("text", { class: name, x, y }, text);
}

function round(number) {
  return Math.round(number * 100) / 100;
}

// -- a lane ------------------------------------------------------------------------------------

function row(frame, lanes, lane) {
  const y = frame.y(lane.name);
  const d = { text: "", markup: "", gone: "" };
  for (const cell of lane.cells) {
    const kind = lane.gone.has(cell.segment) ? "gone" : cell.markup ? "markup" : "text";
    d[kind] += cellPath(frame, cell, y);
  }
  const title = svgElement("title", {}, `${lane.name}${lane.topic ? `: ${lane.topic}` : ""}`);
  const name = svgElement("text", { class: "lane-name", x: 4, y: y + 4 }, shown(lane.topic ?? lane.name));
  return svgElement(
    "g",
    { class: `lane-${lane.colour}` },
    title,
    svgElement("rect", { class: "swatch", x: 0, y: y - 10, width: 2.5, height: 20 }),
    name,
    path("wait", waits(frame, lanes, lane, y)),
    path("cells text", d.text),
    path("cells markup", d.markup),
    path("cells gone", d.gone),
    path("cells text", lane.passes.map((pass) => passPath(frame, pass, y, false)).join("")),
    path("cells masked", lane.passes.map((pass) => passPath(frame, pass, y, true)).join("")),
  );
}

function cellPath(frame, { step }, y) {
  return box(frame.x(step - 1), y - CELL / 2, frame.unit - gapOf(frame), CELL);
}

/** A pass over a block fills its column from below with what is written; the rest is masked. */
function passPath(frame, { step, left, length }, y, isMasked) {
  const masked = (CELL * left) / length;
  const height = isMasked ? masked : CELL - masked;
  const top = y - CELL / 2 + (isMasked ? 0 : masked);
  return height > 0 ? box(frame.x(step - 1), top, frame.unit - gapOf(frame), height) : "";
}

function gapOf(frame) {
  return frame.unit >= GAP_FROM ? 1 : 0;
}

function box(x, y, width, height) {
  return `M${x} ${round(y)}h${round(width)}v${round(height)}h${-round(width)}z`;
}

function waits(frame, lanes, lane, y) {
  const steps = [...lane.cells.map((cell) => cell.step), ...lane.passes.map((pass) => pass.step)];
  if (lanes.stateOf(lane) === "waiting") steps.push(lanes.numSteps + 1);
  let d = "";
  for (let i = 1; i < steps.length; i += 1) {
    if (steps[i] > steps[i - 1] + 1) d += `M${frame.x(steps[i - 1])} ${y}H${frame.x(steps[i] - 1)}`;
  }
  return d;
}

function shown(text) {
  const line = text.replaceAll(/\s+/g, " ").trim();
  return line.length > LABEL_LETTERS ? `${line.slice(0, LABEL_LETTERS - 1)}…` : line;
}

// -- forks, joins, evictions -------------------------------------------------------------------

/** A fork comes down to the lane, a join goes up from it, a cross above it is an eviction. */
function marks(frame, lanes, lane) {
  let lines = "";
  let heads = "";
  let crosses = "";
  for (const mark of lanes.marks) {
    const x = frame.x(mark.step);
    if (mark.kind === "evict" && mark.thread === lane.name) {
      crosses += cross(x, frame.y(lane.name) - CELL / 2 - 4);
    } else if (mark.other === lane.name) {
      const y = frame.y(lane.name);
      const parent = frame.y(mark.thread) + CELL / 2 + 1;
      if (mark.kind === "fork") {
        lines += `M${x} ${parent}V${y - CELL / 2 - 1}`;
        heads += `M${x - 3.5} ${y - CELL / 2 - 6}h7l-3.5 6z`;
      } else {
        lines += `M${frame.x(lane.lastStep)} ${y}H${x}V${parent + 5}`;
        heads += `M${x - 3.5} ${parent + 6}h7l-3.5 -6z`;
      }
    }
  }
  if (!lines && !crosses) return [];
  const parts = [path("mark line", lines), path("mark head", heads), path("cross", crosses)];
  return [svgElement("g", { class: `lane-${lane.colour}` }, ...parts)];
}

function cross(x, y) {
  return `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`;
}

// -- what is seen ------------------------------------------------------------------------------

function chart(frame, steps) {
  const most = (step) => Math.max(0, ...Object.values(step.live));
  steps = steps.filter((step) => most(step) > 0);
  const top = Math.max(1, ...steps.map((step) => step.dense));
  const y = (tokens) => round(frame.bottom - (tokens / top) * (CHART - 4));
  const line = (value) => steps.map((step) => `${frame.x(step.step)} ${y(value(step))}`).join("L");
  const parts = [
    path("base", `M${LABEL_WIDTH} ${frame.bottom}H${frame.x(frame.numSteps)}`),
    label("lane-name", 4, frame.chartTop + 14, "live tokens"),
    label("note", 4, frame.chartTop + 28, "most of a thread;"),
    label("note", 4, frame.chartTop + 41, "line: dense"),
  ];
  if (steps.length > 1) {
    const [first, last] = [frame.x(steps[0].step), frame.x(steps.at(-1).step)];
    parts.push(path("live", `M${first} ${frame.bottom}L${line(most)}L${last} ${frame.bottom}z`));
    parts.push(path("dense", `M${line((step) => step.dense)}`));
  }
  return parts;
}

function axis(frame) {
  const every = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((n) => n * frame.unit >= 44) ?? 10000;
  const group = svgElement("g", { class: "axis" });
  for (let step = 0; step <= frame.numSteps; step += every) {
    const x = frame.x(step);
    group.append(path("grid", `M${x} ${TOP}V${frame.bottom}`));
    group.append(label("tick", x, frame.bottom + 13, step === 0 ? "step" : String(step)));
  }
  return group;
}

/** The picture for those who do not see it. */
function inWords(lanes, rows) {
  const parts = rows.map((lane) => {
    const topic = lane.topic ? ` (${lane.topic})` : "";
    return `${lane.name}${topic}: ${lane.numTokens} tokens, ${lanes.stateOf(lane)}`;
  });
  return `${rows.length} ${rows.length === 1 ? "thread" : "threads"} over ${lanes.numSteps} steps. ${parts.join("; ")}`;
}
