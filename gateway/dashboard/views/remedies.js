// What remedies changed of the command line of one backend, and the order to take that back.

import { named, read } from "../api.js";
import { el, setShown, setText } from "../dom.js";
import { moment, unix } from "../format.js";
import { orderButton } from "../orders.js";
import { Poll } from "../poll.js";
import { table } from "../table.js";

const EVERY_MS = 10_000;

export function remediesView(live, id) {
  const changes = el("p", { class: "sentence" });
  const made = table(
    "Remedies",
    [
      { head: "Remedy", cell: (each) => each.remedy },
      { head: "Applied", cell: (each) => moment(unix(each.at)) },
      { head: "Why", cell: (each) => each.why },
    ],
    (each) => `${each.remedy} ${each.at}`,
  );
  const drop = orderButton(live, "operator", {
    label: "Drop the remedies",
    title: `Drop the remedies of ${id}`,
    path: `backends/${named(id)}/remedies:drop`,
    told: (answer) => answer.sentence,
    done: () => poll.now(),
  });
  const element = el("section", { class: "card", "aria-labelledby": "remedies", hidden: true },
    el("div", { class: "section-head" }, el("h2", { id: "remedies" }, "Remedies in force"), drop));
  const poll = new Poll(async () => {
    const told = (await read("remedies")).data.find((each) => each.backend === id);
    setShown(element, told !== undefined);
    if (told === undefined) return;
    setText(changes, sentence(told));
    made.show(told.applied);
  }, EVERY_MS);
  element.append(poll.problem, changes, made.element);
  return { element, leave: () => poll.end() };
}

function sentence(told) {
  const flags = Object.entries(told.args).map(([name, value]) => `--${name} ${value}`);
  const variables = Object.entries(told.env).map(([name, value]) => `${name}=${value}`);
  const changed = [...flags, ...variables].join(" ");
  return told.on_trial
    ? `The configured command line is tried again, without ${changed}.`
    : `Its command line has ${changed}, which the configuration does not say.`;
}
