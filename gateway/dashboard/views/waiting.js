// What waits in the gateway, and why; and what was refused of late.

import { read } from "../api.js";
import { el, setAttribute, setText } from "../dom.js";
import { clock, counted, duration, unix } from "../format.js";
import { KeyedList } from "../keyedlist.js";
import { to } from "../router.js";
import { stateBadge } from "../state.js";

const ASKED = 12;
const EVERY_MS = 4_000;

export function waitingView(live) {
  const queues = el("p", { class: "queues" });
  const list = el("ol", { class: "events", tabindex: "0", "aria-label": "Requests that waited or were refused" });
  const decisions = new KeyedList(list, (each) => each.id, decision);
  let asked = -Infinity;

  async function ask() {
    if (performance.now() - asked < EVERY_MS) return;
    asked = performance.now();
    const page = await read("decisions", { limit: ASKED });
    decisions.show(page.data);
    list.hidden = page.data.length === 0;
  }

  return {
    element: el("section", { class: "card", "aria-labelledby": "waiting" }, el("h2", { id: "waiting" }, "Waiting and refused"), queues, list),
    show(shown) {
      setText(queues, queueSentence(shown.pools));
      if (shown.now && !live.trouble) ask().catch(() => {}); // the page says elsewhere that nobody answers
    },
  };
}

function queueSentence(pools) {
  const told = pools
    .filter((pool) => pool.queued > 0)
    .map((pool) => {
      const oldest = pool.oldest === null ? "" : `, the oldest for ${duration(pool.oldest)}`;
      const full = pool.state === "saturated" ? "; no backend has room" : "";
      return `${counted(pool.queued, "request")} for ${pool.name}${oldest}${full}`;
    });
  return told.length ? `Waiting here: ${told.join("; ")}.` : "No request waits here.";
}

function decision() {
  const time = el("time");
  const badge = stateBadge();
  const link = el("a");
  return {
    element: el("li", {}, time, el("div", {}, badge.element, " ", link)),
    show(told) {
      setText(time, clock(unix(told.at)));
      badge.show(told.state);
      setText(link, told.sentence);
      setAttribute(link, "href", to("requests", told.id));
    },
  };
}
