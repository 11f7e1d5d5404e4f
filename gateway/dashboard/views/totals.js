// The figures of the whole gateway at the moment that is shown.

import { el, setText } from "../dom.js";
import { UNKNOWN, count, latency, rate } from "../format.js";
import { spark } from "../spark.js";

const FIGURES = [
  { label: "Requests / s", column: "requests", told: rate, perSecond: true, over: sum },
  { label: "In flight", column: "in_flight", told: count, over: sum },
  { label: "Queued here", column: "queued", told: count, over: sum },
  { label: "First token, p95", column: "ttft_p95_s", told: latency, over: largest, note: "of the slowest pool" },
  { label: "Tokens / s", column: "tokens", told: rate, perSecond: true, over: sum },
  { label: "Errors / min", column: "errors", told: rate, perMinute: true, over: sum },
  { label: "Shed / min", column: "shed", told: rate, perMinute: true, over: sum },
];

export function totalsView(live) {
  const parts = FIGURES.map((figure) => {
    const value = el("dd", { class: "figure" });
    const line = spark();
    const box = el("div", {}, el("dt", { title: figure.note ?? null }, figure.label), value, line.element);
    return { figure, value, line, box, values: [] };
  });
  let known = -1; // the version of the history that `values` are of
  return {
    element: el("dl", { class: "totals", "aria-label": "The whole gateway" }, parts.map((part) => part.box)),
    show(shown) {
      const { history } = live;
      if (known !== history.version) {
        known = history.version;
        for (const part of parts) part.values = columnOf(history, part.figure);
      }
      for (const { figure, value, line, values } of parts) {
        setText(value, values.length ? figure.told(values[shown.place] ?? null) : UNKNOWN);
        line.show(values, live.moment === null ? null : shown.place, history.version);
      }
    },
  };
}

/** One column over all pools. */
export function columnOf(history, figure, pool = null) {
  const tracks = pool === null ? [...history.pools.values()] : [history.pools.get(pool)].filter(Boolean);
  const scale = figure.perSecond ? 1 / history.step : figure.perMinute ? 60 / history.step : 1;
  return history.times.map((_, place) => {
    const known = tracks.map((track) => track[figure.column]?.[place] ?? null).filter((value) => value !== null);
    return known.length ? figure.over(known) * scale : null;
  });
}

export function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

export function largest(values) {
  return Math.max(...values);
}
