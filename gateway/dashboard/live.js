// What the page knows of the gateway, and the loop that asks for it.

import { ApiError, read } from "./api.js";
import { unix } from "./format.js";
import { History } from "./history.js";

const STATE_EVERY_MS = 2_000;
const EVENTS_EVERY_MS = 6_000;
const SERIES_EVERY_MS = 10_000;
const WHOLE_MINUTES = 60;
const EVENTS_ASKED = 200;

/** Tells `change` when there is something new to show, and `signedout` when the token is refused. */
export class Live extends EventTarget {
  constructor(me) {
    super();
    this.me = me;
    this.overview = null;
    this.history = new History();
    this.told = []; // events as the gateway tells them
    this.events = []; // these, and changes of phases
    this.moment = null; // seconds since the epoch that the page is rewound to; null: now
    this.then = null; // what the gateway told at that moment; null: not known, or not yet
    this.asksThen = false;
    this.trouble = ""; // why nothing new arrives; empty: it does
    this.asked = 0; // how often the state was asked for
    this.shown = 0; // which of these answers is shown
    this.heard = 0; // when the last answer came, in ms of performance.now()
  }

  /** Whether the user may do what a role may. */
  may(role) {
    const roles = ["viewer", "operator", "admin"];
    return roles.indexOf(this.me.role) >= roles.indexOf(role);
  }

  /** Begin to ask, until the token is refused. While the page is hidden nothing is asked. */
  start() {
    this.#repeat(STATE_EVERY_MS, () => this.#readState());
    this.#repeat(EVENTS_EVERY_MS, () => this.#readEvents());
    this.#repeat(SERIES_EVERY_MS, () => this.#readSeries());
  }

  /** Show a moment of the last hour; null: now. */
  rewind(at) {
    this.moment = at;
    this.then = null;
    this.#changed();
    if (at !== null && !this.asksThen) this.#readThen();
  }

  /** Ask now, as something was ordered. */
  async refresh() {
    await this.#attempt(() => Promise.all([this.#readState(), this.#readEvents()]));
  }

  async #repeat(everyMs, action) {
    let last = -Infinity;
    while (this.me !== null) {
      if (!document.hidden && performance.now() - last >= everyMs) {
        last = performance.now();
        await this.#attempt(action);
      }
      await new Promise((done) => setTimeout(done, 500));
    }
  }

  async #attempt(action) {
    try {
      await action();
      this.heard = performance.now();
      this.trouble = "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401 && this.me !== null) {
        this.me = null;
        this.dispatchEvent(new Event("signedout"));
        return;
      }
      this.trouble = error.message;
    }
    this.#changed();
  }

  async #readState() {
    const turn = ++this.asked;
    const overview = await read("overview");
    if (turn < this.shown) return; // an answer after an order came first
    this.shown = turn;
    this.overview = overview;
    this.events = merged(this.told, overview.transitions);
  }

  async #readEvents() {
    this.told = (await read("events", { limit: EVENTS_ASKED })).data;
    this.events = merged(this.told, this.overview?.transitions ?? []);
  }

  /** Ask what was told at the moment that is shown, until that is answered: a slider passes many. */
  async #readThen() {
    this.asksThen = true;
    for (let at = null; this.moment !== null && at !== this.moment; ) {
      at = this.moment;
      const told = await read("verdict", { at }).catch((error) => {
        if (!(error instanceof ApiError)) throw error;
        return null; // the phases alone are shown
      });
      if (at === this.moment) this.then = told;
    }
    this.asksThen = false;
    this.#changed();
  }

  async #readSeries() {
    const { history } = this;
    const latest = history.times.length ? await read("series", { minutes: 1 }) : null;
    const goesOn = latest !== null && history.meets(latest);
    history.merge(goesOn ? latest : await read("series", { minutes: WHOLE_MINUTES }));
  }

  #changed() {
    if (this.overview !== null || this.trouble) this.dispatchEvent(new Event("change"));
  }
}

/** Return events and changes of phases in one list, the newest first. */
function merged(events, transitions) {
  const told = events.map((each) => ({
    id: `event ${each.id}`,
    at: unix(each.at),
    kind: each.kind,
    subject: each.backend,
    label: each.label,
    detail: each.detail,
  }));
  const changes = transitions.map((each) => ({
    id: `phase ${each.backend} ${each.at} ${each.after}`,
    at: unix(each.at),
    kind: "phase",
    subject: each.backend,
    label: `${each.before} → ${each.after}`,
    detail: each.detail,
  }));
  return [...told, ...changes].sort((one, other) => other.at - one.at);
}
