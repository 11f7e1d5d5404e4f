// The LoRA adapters of one backend: where each stands, why, and orders to load and unload it.

import { named, read } from "../api.js";
import { el, setShown } from "../dom.js";
import { UNKNOWN, count } from "../format.js";
import { rowOrders } from "../orders.js";
import { Poll } from "../poll.js";
import { stateBadge } from "../state.js";
import { table } from "../table.js";

const EVERY_MS = 4_000;
const WANTED = { load: "an operator", unload: "nobody: an operator keeps it out" };

export function adaptersView(live, id) {
  const columns = [
    { head: "Adapter", kind: "code", cell: (each) => each.adapter },
    { head: "State", part: stateCell },
    { head: "Why", cell: (each) => each.detail },
    { head: "Wanted by", cell: (each) => WANTED[each.order] ?? (each.wanted_by ? "the settings" : UNKNOWN) },
    { head: "In flight", kind: "number", cell: (each) => count(each.in_flight) },
    { head: "Path", kind: "code", cell: (each) => each.path ?? UNKNOWN },
  ];
  const offers = offersFor(id, () => poll.now());
  if (live.may("operator")) columns.push({ head: "Orders", part: () => rowOrders(live, offers, (each) => each.adapter) });
  const made = table("Adapters", columns, (each) => each.adapter);
  const element = el("section", { class: "card", "aria-labelledby": "adapters", hidden: true },
    el("h2", { id: "adapters" }, "Adapters"));
  const poll = new Poll(async () => {
    const told = await read("adapters", { backend: id });
    made.show(told.data);
    setShown(element, told.data.length > 0);
  }, EVERY_MS);
  element.append(poll.problem, made.element);
  return { element, leave: () => poll.end() };
}

function stateCell() {
  const badge = stateBadge();
  return { element: badge.element, show: (each) => badge.show(each.state) };
}

function offersFor(id, changed) {
  const order = (verb, label, danger = false) => (each) => ({
    label,
    title: `${label} ${each.adapter} on ${id}`,
    danger,
    path: `backends/${named(id)}/adapters:${verb}`,
    body: { adapter: each.adapter, path: verb === "load" ? each.path : null },
    told: (answer) => answer.sentence,
    done: changed,
  });
  return [
    { label: "Load", order: order("load", "Load"), fits: (each) => each.order !== "load" && each.state === "not_loaded" },
    { label: "Unload", order: order("unload", "Unload", true), fits: (each) => each.order !== "unload" && each.state === "loaded" },
    { label: "End the order", order: order("release", "End the order"), fits: (each) => each.order !== null },
  ];
}
