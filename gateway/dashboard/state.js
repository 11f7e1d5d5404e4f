// How a state is drawn: a shape and a colour, so that colour never speaks alone.

import { el, setAttribute, setText } from "./dom.js";

const TONES = {
  good: ["ready", "ok", "active", "done", "admitted", "running", "loaded"],
  warn: ["degraded", "saturated", "starting", "restarting", "pending", "note", "reading", "waiting", "rotating", "rejected", "unauthenticated", "upstream_rejected", "loading", "unloading"],
  idle: ["cordoned", "draining", "asleep", "stopped", "unknown", "revoked", "expired", "left", "client_gone", "shutdown", "not_loaded"],
};
const SHAPES = { good: "●", warn: "◐", idle: "◌", bad: "▲" };

/** The tone of a state: good, warn, idle or bad. */
export function toneOf(state) {
  const found = Object.entries(TONES).find(([, states]) => states.includes(state));
  return found ? found[0] : "bad";
}

/** A state as a shape and a word; `show(state)` changes it. */
export function stateBadge() {
  const shape = el("span", { class: "shape", "aria-hidden": "true" });
  const word = el("span");
  const element = el("span", { class: "state" }, shape, word);
  return {
    element,
    show(state) {
      setAttribute(element, "data-tone", toneOf(state));
      setText(shape, SHAPES[toneOf(state)]);
      setText(word, state);
    },
  };
}
