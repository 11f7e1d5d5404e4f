// Requests that are refused because two backends died as they ran, and the order to let one be sent again.

import { named, read } from "../api.js";
import { el, setShown } from "../dom.js";
import { clock, count, unix } from "../format.js";
import { rowOrders } from "../orders.js";
import { Poll } from "../poll.js";
import { table } from "../table.js";

const EVERY_MS = 12_000;

export function quarantineView(live) {
  const columns = [
    { head: "Id", kind: "code", cell: (each) => each.id },
    { head: "Pool", cell: (each) => each.pool },
    { head: "Bytes", kind: "number", cell: (each) => count(each.body_bytes) },
    { head: "Died with it", cell: (each) => each.deaths.map((death) => `${death.backend} at ${clock(unix(death.at))}`).join(", ") },
    { head: "Refused, by tenant", cell: (each) => Object.entries(each.refused).map(([tenant, times]) => `${tenant}: ${count(times)}`).join(", ") },
    { head: "Until", cell: (each) => clock(unix(each.until)) },
  ];
  const offers = [{ label: "Let it be sent again", order: (each) => liftOrder(each, () => poll.now()), fits: () => true }];
  if (live.may("operator")) columns.push({ head: "Orders", part: () => rowOrders(live, offers, (each) => each.id) });
  const made = table("Requests in quarantine", columns, (each) => each.id);
  const element = el("section", { class: "card", "aria-labelledby": "quarantine", hidden: true },
    el("h2", { id: "quarantine" }, "Requests in quarantine"));
  const poll = new Poll(async () => {
    const told = await read("quarantine");
    made.show(told.data);
    setShown(element, told.data.length > 0);
  }, EVERY_MS);
  element.append(poll.problem, made.element);
  return { element, leave: () => poll.end() };
}

function liftOrder(suspect, changed) {
  return {
    label: "Let it be sent again",
    title: `Let ${suspect.id} be sent again`,
    danger: true,
    path: `quarantine/${named(suspect.id)}:lift`,
    told: () => "The request is no longer refused. If it kills a server again, its deaths are counted anew.",
    done: changed,
  };
}
