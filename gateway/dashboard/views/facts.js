// What there is to know of a backend, as pairs of a name and a value.

import { el, setShown, setText } from "../dom.js";
import { UNKNOWN, count, duration, percent, unix, moment } from "../format.js";

const FACTS = [
  ["Phase", (told) => `${told.phase}, for ${duration(told.phase_age_s)} (since ${moment(unix(told.since))})`],
  ["Reason", (told) => told.reason],
  ["Engine", (told) => [told.engine, told.version].filter(Boolean).join(" ")],
  ["Models", (told) => told.models.join(", ")],
  ["Context window", (told) => (told.window_tokens === null ? "" : `${count(told.window_tokens)} tokens`)],
  ["Requests of this gateway", (told) => `${count(told.in_flight)}${told.limit === null ? "" : ` of at most ${count(told.limit)}`}`],
  ["At the engine", (told) => (told.running === null ? "" : `${count(told.running)} running, ${count(told.waiting)} waiting`)],
  ["KV cache", (told) => (told.kv_usage_ratio === null ? "" : `${percent(told.kv_usage_ratio)} used; ${percent(told.kv_projected_ratio)} with what was sent since`)],
  ["GPUs", (told) => told.gpus.map(gpu).join("; ")],
  ["Its figures are from", (told) => (told.scrape_age_s === null ? "" : `${duration(told.scrape_age_s)} ago${told.stale ? ", which is too old" : ""}`)],
  ["Adapters kept back", (told) => Object.entries(told.adapters_kept_back).map(([name, why]) => `${name}: ${why}`).join(", ")],
  ["Supervision", (told) => (told.supervision === null ? "none: nobody here starts or restarts it" : supervised(told.supervision))],
  ["Why it is not restarted", (told) => (told.supervision?.waits ? `${told.supervision.waits.why}: ${told.supervision.waits.evidence}` : "")],
  ["Trouble of its launcher", (told) => told.supervision?.trouble ?? ""],
];

export function factsOf() {
  const rows = FACTS.map(([name, told]) => {
    const value = el("dd", {}, UNKNOWN);
    return { told, value, row: el("div", {}, el("dt", {}, name), value) };
  });
  return {
    element: el("section", { class: "card", "aria-labelledby": "facts" }, el("h2", { id: "facts" }, "Facts"),
      el("dl", { class: "facts" }, rows.map((each) => each.row))),
    show(told) {
      for (const { told: of, value, row } of rows) {
        const text = of(told);
        setText(value, text);
        setShown(row, text !== "");
      }
    },
  };
}

function gpu(told) {
  const memory = `${percent(told.memory_used_bytes / told.memory_bytes)} of its memory used`;
  const name = told.part === null ? told.index : `${told.index}, MIG part ${told.part}`;
  return `${name}: ${memory}${told.busy_ratio === null ? "" : `, ${percent(told.busy_ratio)} busy`}`;
}

function supervised(told) {
  const parts = [told.launched ? "launched by this gateway" : "restarted by this gateway"];
  parts.push(told.suspended ? "suspended until an operator acts" : told.state);
  if (told.own_restarts) parts.push(`${count(told.own_restarts)} restarts by its service manager`);
  return parts.join("; ");
}
