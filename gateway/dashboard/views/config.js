// The settings in force, each with where it is written; what was put in force; and the orders to reload and to upgrade.

import { read } from "../api.js";
import { el, setText } from "../dom.js";
import { count, moment, unix } from "../format.js";
import { orderButton } from "../orders.js";
import { Poll } from "../poll.js";
import { stateBadge } from "../state.js";
import { table } from "../table.js";

const EVERY_MS = 10_000;
const UPGRADE_MS = 150_000; // the gateway gives up a little earlier

export function configView(live) {
  let settings = [];
  const search = el("input", { id: "search", type: "search", placeholder: "such as queue", input: () => show() });
  const written = el("input", { id: "written", type: "checkbox", checked: true, change: () => show() });
  const file = el("p", { class: "hint" });
  const shown = el("p", { class: "hint", role: "status" });
  const made = table(
    "Settings in force",
    [
      { head: "Setting", kind: "code", cell: (each) => each.setting },
      { head: "Value", kind: "code", cell: (each) => valueOf(each.value) },
      { head: "Written in", cell: (each) => each.origin },
    ],
    (each) => each.setting,
  );
  const history = historyOf();
  const poll = new Poll(async () => {
    const told = await read("config");
    settings = told.settings;
    setText(file, `${told.file ?? "no file"}, version ${told.hash}`);
    show();
    history.show((await read("config/history", { limit: 20 })).data);
  }, EVERY_MS);

  function show() {
    const words = search.value.toLowerCase();
    const found = settings.filter((each) =>
      (!written.checked || each.origin !== "default") &&
      `${each.setting} ${valueOf(each.value)} ${each.origin}`.toLowerCase().includes(words));
    made.show(found);
    setText(shown, `${count(found.length)} of ${count(settings.length)} settings`);
  }

  return {
    element: el(
      "div",
      { class: "view" },
      el("section", { class: "card", "aria-labelledby": "settings" },
        el("div", { class: "section-head" }, el("h1", { id: "settings" }, "Configuration"),
          el("div", { class: "buttons" }, orderButton(live, "operator", reloadOrder()), orderButton(live, "admin", upgradeOrder()))),
        poll.problem, file,
        el("div", { class: "filters" },
          el("label", { for: "search" }, "Search"), search,
          written, el("label", { for: "written" }, "Only what is written"), shown),
        made.element),
      history.element,
    ),
    show() {},
    leave: () => poll.end(),
  };
}

function reloadOrder() {
  return {
    label: "Reload the file",
    title: "Put the file in force",
    path: "config:reload",
    told: (answer) => (answer.effect.length ? `What changes: ${answer.effect.join("; ")}.` : "The file changes nothing."),
  };
}

function upgradeOrder() {
  return {
    label: "Upgrade",
    title: "Have a new process take over",
    path: "upgrade",
    untried: "A new process of the gateway takes over, with the code and the settings file as they are now. No request is lost. "
      + "If it cannot serve, nothing changes. This takes up to two minutes.",
    patienceMs: UPGRADE_MS,
    told: (answer) => answer.sentence,
  };
}

function historyOf() {
  const made = table(
    "What was put in force",
    [
      { head: "Time", cell: (each) => moment(unix(each.at)) },
      { head: "Outcome", part: outcome },
      { head: "By", cell: (each) => each.by },
      { head: "Reason", cell: (each) => each.reason },
      { head: "What it changed, or why not", cell: (each) => (each.done ? each.effect : each.findings).join("; ") },
    ],
    (each) => each.id,
  );
  return {
    element: el("section", { class: "card", "aria-labelledby": "history" }, el("h2", { id: "history" }, "History"), made.element),
    show: made.show,
  };
}

function outcome() {
  const badge = stateBadge();
  return { element: badge.element, show: (each) => badge.show(each.done ? "done" : "failed") };
}

function valueOf(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
