// One request from its arrival to its end: what became of it, when, where, and why there.

import { named, read } from "../api.js";
import { el, setShown, setText } from "../dom.js";
import { UNKNOWN, count, latency, moment, unix } from "../format.js";
import { KeyedList } from "../keyedlist.js";
import { Poll } from "../poll.js";
import { setProse } from "../prose.js";
import { to } from "../router.js";
import { stateBadge } from "../state.js";
import { table } from "../table.js";

const EVERY_MS = 2_000;
const seconds = (value) => (value === null ? UNKNOWN : `${value.toFixed(3)} s`);

export function requestView(live, id) {
  const badge = stateBadge();
  const sentence = el("p", { class: "sentence" });
  const message = el("p", {});
  const setting = el("p", {});
  const facts = el("p", { class: "hint" });
  const steps = timeline();
  const parts = [attempts(), candidates(), verdicts(), changes(), tokens()];
  const poll = new Poll(async () => {
    const told = await read(`requests/${named(id)}`);
    badge.show(told.outcome ?? told.state);
    setProse(sentence, told.sentence);
    setProse(message, told.message ? `Its client was told: ${told.message}` : "");
    setText(setting, told.setting ? `What decided: ${told.setting.name} = ${JSON.stringify(told.setting.value)} (${told.setting.origin}).` : "");
    setText(facts, factsOf(told));
    steps.show(told);
    for (const part of parts) part.show(told);
    if (told.state === "ended") poll.end();
  }, EVERY_MS);
  return {
    element: el(
      "div",
      { class: "view" },
      el("p", { class: "crumbs" }, el("a", { href: to("requests") }, "Requests"), ` / ${id}`),
      el("section", { class: "card backend-head", "aria-label": "What became of it" },
        el("div", { class: "section-head" }, el("h1", {}, id), badge.element),
        poll.problem, sentence, message, setting, facts),
      steps.element,
      el("div", { class: "columns" }, parts.map((part) => part.element)),
    ),
    show() {},
    leave: () => poll.end(),
  };
}

function factsOf(told) {
  return [
    moment(unix(told.at)),
    told.endpoint,
    told.model && `model ${told.model}`,
    told.stream ? "streamed" : "not streamed",
    told.key_id && `key ${told.key_id}`,
    told.tenant && `tenant ${told.tenant}`,
    told.client && `client ${told.client}`,
    told.fallback && `sent here as the pool ${told.fallback.pool} could not take it (${told.fallback.cause})`,
    told.not_resumed && `not resumed: ${told.not_resumed}`,
  ].filter(Boolean).join(" · ");
}

/** The steps in their order; each bar begins where its step did, and ends where the next one begins. */
function timeline() {
  const list = el("ol", { class: "steps" });
  const rows = new KeyedList(list, (each) => each.key, step);
  return {
    element: el("section", { class: "card", "aria-labelledby": "steps" }, el("h2", { id: "steps" }, "Timeline"), list),
    show({ timeline: told }) {
      const whole = Math.max(told.at(-1)?.after_s ?? 0, 1e-6);
      rows.show(told.map((each, place) => ({
        ...each,
        key: `${place} ${each.step}`,
        begins: each.after_s / whole,
        ends: (told[place + 1]?.after_s ?? whole) / whole,
      })));
    },
  };
}

function step() {
  const after = el("span", { class: "number" });
  const name = el("strong");
  const text = el("span", { class: "detail" });
  const bar = el("i", { "aria-hidden": "true" });
  return {
    element: el("li", {}, after, el("div", {}, name, " ", text), el("div", { class: "bar" }, bar)),
    show(told) {
      setText(after, seconds(told.after_s));
      setText(name, told.step.replace("_", " "));
      setProse(text, told.sentence);
      bar.style.marginLeft = `${told.begins * 100}%`;
      bar.style.width = `max(2px, ${(told.ends - told.begins) * 100}%)`;
    },
  };
}

/** A table that is shown when it has rows. */
function section(title, columns, keyOf, rowsOf) {
  const made = table(title, columns, keyOf);
  const element = el("section", { class: "card", hidden: true }, el("h2", {}, title), made.element);
  return {
    element,
    show(told) {
      const rows = rowsOf(told).map((row, place) => ({ ...row, place }));
      made.show(rows);
      setShown(element, rows.length > 0);
    },
  };
}

function attempts() {
  return section("Attempts", [
    { head: "Backend", kind: "brief", cell: (each) => each.backend },
    { head: "Sent after", kind: "number", cell: (each) => seconds(each.sent_s) },
    { head: "Took", kind: "number", cell: (each) => seconds(each.took_s) },
    { head: "Outcome", cell: (each) => each.outcome },
    { head: "Id at the engine", kind: "code", cell: (each) => each.engine_request_id },
  ], (each) => String(each.place), (told) => told.tried);
}

function candidates() {
  return section("Why this backend", [
    { head: "Backend", kind: "brief", cell: (each) => each.backend },
    { head: "Expected to take", kind: "number", cell: (each) => latency(each.costs_s) },
    { head: "", cell: (each) => (each.chosen ? "chosen" : "") },
  ], (each) => each.backend, (told) => told.weighed);
}

function verdicts() {
  return section("What each backend said", [
    { head: "Backend", cell: (each) => each.id },
    { head: "Verdict", cell: (each) => each.verdict },
    { head: "Expected to take", kind: "number", cell: (each) => latency(each.expected_s) },
    { head: "Setting", cell: (each) => (each.setting === null ? "" : `${each.setting.name} = ${JSON.stringify(each.setting.value)} (${each.setting.origin})`) },
  ], (each) => each.id, (told) => told.decision?.backends ?? []);
}

function changes() {
  return section("What was changed in the body", [
    { head: "Field", kind: "code brief", cell: (each) => each.field },
    { head: "Change", cell: (each) => each.sentence },
  ], (each) => each.field, (told) => told.changed);
}

function tokens() {
  return section("Tokens", [
    { head: "", cell: (each) => each.name },
    { head: "Expected", kind: "number", cell: (each) => count(each.expected) },
    { head: "Used", kind: "number", cell: (each) => count(each.used) },
    { head: "Note", cell: (each) => each.note },
  ], (each) => each.name, ({ tokens: told }) => [
    { name: "Prompt", expected: told.expected_prompt, used: told.prompt, note: told.exact === false ? "expected by its size" : "" },
    { name: "From the cache", expected: told.expected_cached, used: told.cached, note: "" },
    { name: "Output", expected: told.expected_output, used: told.output, note: told.output_limit === null ? "" : `limit ${count(told.output_limit)}` },
  ]);
}
