// The last hour: charts and events on one time axis, and the slider that rewinds the page to a moment of it.

import { chart } from "../chart.js";
import { el, setAttribute, setShown, setText, svg } from "../dom.js";
import { clock, count, latency, rate } from "../format.js";
import { columnOf, largest, sum } from "./totals.js";

const EVERY_POOL = "";

export function timelineView(live) {
  const slider = el("input", { type: "range", id: "rewind", min: 0, max: 0, step: 1, input: moved });
  const when = el("output", { for: "rewind" });
  const now = el("button", { type: "button", class: "quiet", click: () => live.rewind(null) }, "Back to now");
  const ticks = svg("svg", { class: "ticks", viewBox: "0 0 1000 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  const pools = el("select", { id: "pool", change: () => show() });
  const charts = madeCharts((time) => live.rewind(Math.min(time, live.history.times.at(-1))));
  const element = el(
    "section",
    { class: "timeline", "aria-labelledby": "last-hour" },
    el("div", { class: "section-head" },
      el("h2", { id: "last-hour" }, "Last hour"),
      el("span", {}, el("label", { for: "pool" }, "Pool"), " ", pools)),
    el("div", { class: "charts" }, charts.map((each) => each.chart.element)),
    el("div", { class: "rewind" },
      el("label", { for: "rewind" }, "Rewind"),
      el("div", { class: "track" }, ticks, slider), when, now),
  );
  let drawn = "";

  function moved() {
    const place = Number(slider.value);
    live.rewind(place >= live.history.times.length - 1 ? null : live.history.times[place]);
  }

  function show() {
    const { history, moment } = live;
    const last = history.times.length - 1;
    const place = moment === null ? last : history.placeOf(moment);
    offerPools(pools, live.overview.pools.map((pool) => pool.name));
    setAttribute(slider, "max", Math.max(0, last));
    slider.value = String(Math.max(0, place));
    const told = moment === null ? "now" : clock(moment);
    setText(when, told);
    setAttribute(slider, "aria-valuetext", told);
    setShown(now, moment !== null);
    const wanted = `${history.version} ${moment} ${pools.value} ${live.events[0]?.id}`;
    if (wanted === drawn || last < 0) return;
    drawn = wanted;
    const pool = pools.value === EVERY_POOL ? null : pools.value;
    const events = live.events.filter((event) => event.at >= history.times[0] &&
      (pool === null || event.subject.startsWith(`${pool}/`) || event.subject === pool));
    for (const each of charts) {
      const columns = each.figures.map((figure) => columnOf(history, figure, pool));
      each.chart.show(history.times, columns, place, events, moment);
    }
    drawTicks(ticks, events, history.times);
  }

  return { element, show, leave: () => charts.forEach((each) => each.chart.leave()) };
}

function madeCharts(chosen) {
  const made = (title, told, lines) => ({
    figures: lines.map(([, , column, over, scale]) => ({ column, over, ...scale })),
    chart: chart({ title, told, chosen, lines: lines.map(([label, colour]) => ({ label, colour })) }),
  });
  const perSecond = { perSecond: true };
  return [
    made("Requests / s", rate, [
      ["all", "accent", "requests", sum, perSecond],
      ["errors", "bad", "errors", sum, perSecond],
      ["shed", "warn", "shed", sum, perSecond],
    ]),
    made("First token", latency, [
      ["p50", "accent", "ttft_p50_s", largest],
      ["p95", "second", "ttft_p95_s", largest],
    ]),
    made("Tokens / s", rate, [["written", "accent", "tokens", sum, perSecond]]),
    made("Requests at a time", count, [
      ["in flight", "accent", "in_flight", sum],
      ["queued here", "warn", "queued", sum],
    ]),
  ];
}

function offerPools(select, names) {
  const offered = [...select.options].slice(1).map((option) => option.value);
  if (select.options.length && offered.join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(
    el("option", { value: EVERY_POOL }, names.length > 1 ? "all (latencies: the slowest)" : "all"),
    ...names.map((name) => el("option", { value: name }, name)),
  );
  select.value = names.includes(chosen) ? chosen : EVERY_POOL;
}

/** Mark on the slider where something happened. */
function drawTicks(ticks, events, times) {
  const span = Math.max(1, times.at(-1) - times[0]);
  const places = new Set(events.map((event) => Math.round(((event.at - times[0]) / span) * 1000)));
  ticks.replaceChildren(...[...places].map((x) => svg("rect", { x, y: 0, width: 2, height: 8 })));
}

