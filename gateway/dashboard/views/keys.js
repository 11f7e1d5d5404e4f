// The keys and what they used; an admin also makes, rotates and revokes them.

import { named, readAll } from "../api.js";
import { el } from "../dom.js";
import { UNKNOWN, count, moment, money, unix } from "../format.js";
import { rowOrders } from "../orders.js";
import { Poll } from "../poll.js";
import { setProse } from "../prose.js";
import { stateBadge } from "../state.js";
import { table } from "../table.js";
import { newKey } from "./newkey.js";

const EVERY_MS = 10_000;

export function keysView(live) {
  const admin = live.may("admin");
  const used = new Map();
  const keys = table("Keys", columns(live, used, admin, () => poll.now()), (key) => key.id);
  const total = el("p", { class: "hint" });
  const poll = new Poll(async () => {
    const [listed, usage] = await Promise.all([readAll("keys"), readAll("usage", { by: "key" })]);
    used.clear();
    for (const row of usage) used.set(row.key, row);
    keys.show(listed);
    const tokens = usage.reduce((sum, row) => sum + row.input_tokens + row.output_tokens, 0);
    setProse(total, `Today, since midnight UTC: ${count(tokens)} tokens. \`vllm-gateway usage\` tells of other days.`);
  }, EVERY_MS);
  const models = usageByModel();
  return {
    element: el(
      "div",
      { class: "view" },
      el("section", { class: "card", "aria-labelledby": "keys" },
        el("div", { class: "section-head" }, el("h1", { id: "keys" }, "Keys"), admin ? newKey(live, () => poll.now()) : null),
        poll.problem, total, keys.element),
      models.element,
    ),
    show() {},
    leave() {
      poll.end();
      models.leave();
    },
  };
}

function columns(live, used, admin, changed) {
  const time = (text) => (text ? moment(unix(text)) : UNKNOWN);
  const found = [
    { head: "Name", cell: (key) => key.name },
    { head: "State", part: () => partOf((key) => key.state) },
    { head: "Id", cell: (key) => key.id },
    { head: "Kind", cell: (key) => [key.kind, key.role].filter(Boolean).join(", ") },
    { head: "Tenant", cell: (key) => key.tenant },
    { head: "Tier", cell: (key) => key.tier ?? UNKNOWN },
    { head: "Requests today", kind: "number", cell: (key) => count(used.get(key.id)?.requests ?? 0) },
    { head: "Input", kind: "number", cell: (key) => count(used.get(key.id)?.input_tokens ?? 0) },
    { head: "Output", kind: "number", cell: (key) => count(used.get(key.id)?.output_tokens ?? 0) },
    { head: "Last used", kind: "brief", cell: (key) => time(key.last_used) },
    { head: "Ends", kind: "brief", cell: (key) => time(key.ends) },
  ];
  if (admin) found.push({ head: "Orders", part: () => keyOrders(live, changed) });
  return found;
}

function partOf(stateIn) {
  const badge = stateBadge();
  return { element: badge.element, show: (row) => badge.show(stateIn(row)) };
}

function keyOrders(live, changed) {
  const rotate = (key) => ({
    label: "Rotate",
    title: `Rotate ${key.name}`,
    path: `keys/${named(key.id)}:rotate`,
    told: (answer) => (answer.key === null
      ? "The key gets another secret. The one that it has works for 24 hours more."
      : "This is the new secret. It is shown this once:"),
    done: (answer, effect) => {
      effect.append(el("code", { class: "secret" }, answer.key));
      changed();
    },
  });
  const revoke = (key) => ({
    label: "Revoke",
    title: `Revoke ${key.name}`,
    danger: true,
    path: `keys/${named(key.id)}:revoke`,
    told: () => "The key is refused from now on, for good.",
    done: changed,
  });
  const offers = [
    { label: "Rotate", order: rotate, fits: (key) => !["revoked", "expired"].includes(key.state) },
    { label: "Revoke", order: revoke, fits: (key) => key.state !== "revoked" },
  ];
  return rowOrders(live, offers, (key) => key.name);
}

function usageByModel() {
  const made = table(
    "Usage today by tenant and model",
    [
      { head: "Tenant", cell: (row) => row.tenant },
      { head: "Model", cell: (row) => [row.model, row.adapter].filter(Boolean).join(" · ") },
      { head: "Requests", kind: "number", cell: (row) => count(row.requests) },
      { head: "Input tokens", kind: "number", cell: (row) => count(row.input_tokens) },
      { head: "From the cache", kind: "number", cell: (row) => count(row.cached_tokens) },
      { head: "Output tokens", kind: "number", cell: (row) => count(row.output_tokens) },
      { head: "Money", kind: "number", cell: (row) => money(row.money) },
    ],
    (row) => row.id,
  );
  const poll = new Poll(async () => made.show(await readAll("usage", { by: "tenant,model,adapter" })), EVERY_MS);
  return {
    element: el("section", { class: "card", "aria-labelledby": "usage" }, el("h2", { id: "usage" }, "Usage today"), poll.problem, made.element),
    leave: () => poll.end(),
  };
}
