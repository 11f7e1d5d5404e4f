// One backend: how it is and why, its last hour, its log, what happened to it, and orders for it.

import { named, read } from "../api.js";
import { chart } from "../chart.js";
import { el, setShown } from "../dom.js";
import { count, latency, percent, rate } from "../format.js";
import { backendOrder, orderButton } from "../orders.js";
import { Poll } from "../poll.js";
import { setProse } from "../prose.js";
import { to } from "../router.js";
import { stateBadge } from "../state.js";
import { adaptersView } from "./adapters.js";
import { eventsView } from "./events.js";
import { factsOf } from "./facts.js";
import { logView } from "./log.js";
import { remediesView } from "./remedies.js";

const EVERY_MS = 4_000;
const OUT = new Set(["cordoned", "draining", "suspended"]); // states that `undrain` ends

export function backendView(live, id) {
  const badge = stateBadge();
  const detail = el("p", { class: "sentence" });
  const diagnosis = el("p");
  const facts = factsOf();
  const charts = backendCharts(live, id);
  const events = eventsView(live, id);
  const cards = [adaptersView(live, id), remediesView(live, id)];
  const logPlace = el("div");
  let log = null; // none before it is known that somebody keeps one
  const orders = ordersFor(live, id);
  const poll = new Poll(async () => {
    const told = await read(`backends/${named(id)}`);
    badge.show(told.state);
    setProse(detail, told.detail);
    const found = told.supervision?.diagnosis;
    setProse(diagnosis, found && !told.detail.includes(found.cause) ? `Diagnosis: ${found.cause}` : "");
    facts.show(told);
    orders.show(told);
    if (log === null && told.supervision !== null && live.may("operator")) {
      log = logView(id);
      logPlace.append(log.element);
    }
    log?.mark(found?.evidence ?? "");
  }, EVERY_MS);
  return {
    element: el(
      "div",
      { class: "view" },
      el("p", { class: "crumbs" }, el("a", { href: to("overview") }, "Overview"), ` / ${id}`),
      el("section", { class: "card backend-head", "aria-label": "State" },
        el("div", { class: "section-head" }, el("h1", {}, id), badge.element),
        poll.problem, detail, diagnosis, orders.element),
      el("div", { class: "columns" }, facts.element, events.element),
      cards.map((each) => each.element),
      el("section", { class: "timeline", "aria-labelledby": "hour" }, el("h2", { id: "hour" }, "Last hour"), charts.element),
      logPlace,
    ),
    show() {
      if (live.overview === null) return;
      charts.show();
      events.show();
    },
    leave() {
      poll.end();
      charts.leave();
      for (const each of cards) each.leave();
      log?.leave();
    },
  };
}

/** Buttons for the orders that make sense for a backend as it is. */
function ordersFor(live, id) {
  const offered = [
    [backendOrder("drain", "Drain", id, true), (told) => !OUT.has(told.state)],
    [backendOrder("undrain", "Undrain", id), (told) => OUT.has(told.state)],
    [backendOrder("restart", "Restart", id, true), (told) => told.supervision !== null],
  ].map(([order, fits]) => ({ button: orderButton(live, "operator", order), fits }));
  const shown = (fit) => {
    for (const { button, fits } of offered) if (button !== null) setShown(button, fit(fits));
  };
  shown(() => false); // until it is known how the backend is
  return {
    element: el("div", { class: "buttons" }, offered.map((each) => each.button)),
    show: (told) => shown((fits) => fits(told)),
  };
}

function backendCharts(live, id) {
  const made = [
    ["KV cache", percent, [["used", "accent", "kv", false]]],
    ["Requests at its engine", count, [["running", "accent", "running", false], ["waiting", "warn", "waiting", false]]],
    ["First token", latency, [["p50", "accent", "ttft_p50_s", false], ["p95", "second", "ttft_p95_s", false]]],
    ["Tokens / s", rate, [["written", "accent", "tokens", true]]],
  ].map(([title, told, lines]) => ({
    lines,
    chart: chart({
      title,
      told,
      lines: lines.map(([label, colour]) => ({ label, colour })),
      chosen: (time) => live.rewind(time),
    }),
  }));
  return {
    element: el("div", { class: "charts" }, made.map((each) => each.chart.element)),
    show() {
      const { history, moment } = live;
      if (history.times.length === 0) return;
      const track = history.backends.get(id);
      const place = moment === null ? history.times.length - 1 : history.placeOf(moment);
      const events = live.events.filter((event) => event.subject === id);
      const none = history.times.map(() => null);
      for (const { lines, chart: drawn } of made) {
        const columns = lines.map(([, , column, perSecond]) =>
          (perSecond ? history.perSecond(track, column) : track?.[column]) ?? none);
        drawn.show(history.times, columns.map((column) => (column.length ? column : none)), place, events, moment);
      }
    },
    leave: () => made.forEach((each) => each.chart.leave()),
  };
}
