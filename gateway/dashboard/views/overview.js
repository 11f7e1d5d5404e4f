// The first view: verdict, figures, pools and backends, the last hour, what waits, what happened.

import { el } from "../dom.js";
import { snapshot } from "../snapshot.js";
import { eventsView } from "./events.js";
import { poolsView } from "./pools.js";
import { quarantineView } from "./quarantine.js";
import { timelineView } from "./timeline.js";
import { totalsView } from "./totals.js";
import { verdictView } from "./verdict.js";
import { waitingView } from "./waiting.js";

export function overviewView(live) {
  const timeline = timelineView(live);
  const parts = [...[verdictView, totalsView, poolsView].map((make) => make(live)), timeline];
  const quarantine = quarantineView(live);
  const below = [waitingView(live), eventsView(live)];
  return {
    element: el("div", { class: "view" }, parts.map((part) => part.element), quarantine.element,
      el("div", { class: "columns" }, below.map((part) => part.element))),
    show() {
      if (live.overview === null) return;
      const shown = snapshot(live);
      for (const part of [...parts, ...below]) part.show(shown);
    },
    leave() {
      timeline.leave();
      quarantine.leave();
    },
  };
}
