// What the form asks for, as the body of a request; and the key, if the server wants one.

import { byId, element } from "./dom.js";

const KEY = "stretto.key";
const WITH_BUDGET = new Set(["streaming_llm", "paged_h2o", "random_evict", "window"]);

export function savedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Fills in the methods of the model, and shows the budget where a method needs one. What cannot
 *  be run sequentially is not compared with that. */
export function offerMethods(card) {
  const select = byId("method");
  const methods = ["auto", ...card.stretto.methods];
  select.replaceChildren(...methods.map((name) => element("option", { value: name }, name)));
  const follow = () => {
    byId("budget-field").hidden = !WITH_BUDGET.has(select.value);
  };
  select.addEventListener("change", follow);
  follow();
  const compare = byId("compare");
  compare.disabled = !methods.includes("sequential");
  if (compare.disabled) compare.checked = false;
}

/** The fields that all requests have. `method` null: what the form says. */
export function readSettings(method = null) {
  const chosen = method ?? byId("method").value;
  const seed = byId("seed").value;
  const extension = { method: chosen };
  if (WITH_BUDGET.has(chosen)) extension.budget = budgetOf(byId("budget").value.trim());
  return {
    max_tokens: byId("max-tokens").valueAsNumber || 256,
    temperature: byId("temperature").valueAsNumber || 0,
    ...(seed === "" ? {} : { seed: Number(seed) }),
    stream: true,
    stream_options: { threads: true, include_usage: true },
    stretto: extension,
  };
}

/** The method of the form by its own name, which is no `auto`: that is the first of the model's. */
export function chosenMethod(card) {
  const chosen = byId("method").value;
  return chosen === "auto" ? (card.stretto.methods[0] ?? chosen) : chosen;
}

export function systemMessage() {
  return byId("system").value.trim();
}

function budgetOf(text) {
  return /^\d+$/.test(text) ? Number(text) : text;
}
