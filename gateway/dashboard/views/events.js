// What happened to backends, and what the gateway did about it, up to the moment that is shown.

import { el, setAttribute, setText } from "../dom.js";
import { clock, moment } from "../format.js";
import { KeyedList } from "../keyedlist.js";
import { to } from "../router.js";

const SHOWN = 40;

export function eventsView(live, subject = null) {
  const list = el("ol", { class: "events", tabindex: "0", "aria-label": "Events, the newest first" });
  const none = el("p", { class: "hint" }, "Nothing happened yet.");
  const events = new KeyedList(list, (event) => event.id, event);
  return {
    element: el("section", { class: "card", "aria-labelledby": "events" }, el("h2", { id: "events" }, "Events"), list, none),
    show() {
      const until = live.moment ?? Infinity;
      const shown = live.events
        .filter((each) => each.at <= until && (subject === null || each.subject === subject))
        .slice(0, SHOWN);
      events.show(shown);
      none.hidden = shown.length > 0;
      list.hidden = shown.length === 0;
    },
  };
}

function event() {
  const time = el("time");
  const subject = el("a");
  const label = el("span", { class: "label" });
  const detail = el("span", { class: "detail" });
  return {
    element: el("li", {}, time, el("div", {}, subject, " ", label, " ", detail)),
    show(told) {
      setText(time, clock(told.at));
      setAttribute(time, "title", moment(told.at));
      setText(subject, told.subject || "gateway");
      setAttribute(subject, "href", told.subject.includes("/") ? to("backends", told.subject) : null);
      setText(label, told.kind === "phase" ? told.label : [told.kind, told.label].filter(Boolean).join(" · "));
      setText(detail, told.detail);
    },
  };
}
