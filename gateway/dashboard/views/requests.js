// The requests that are under way or ended lately, with filters.

import { read } from "../api.js";
import { el, setAttribute, setShown, setText } from "../dom.js";
import { UNKNOWN, clock, count, latency, unix } from "../format.js";
import { Poll } from "../poll.js";
import { to } from "../router.js";
import { stateBadge } from "../state.js";
import { table } from "../table.js";

const EVERY_MS = 3_000;
const PAGE = 50;
const MOST = 1_000;
const LONG_ID = 20;
const STATES = ["reading", "waiting", "running", "ended"];
const FILTERS = [["pool", "Pool"], ["model", "Model"], ["backend", "Backend"], ["key", "Key id"], ["tenant", "Tenant"]];

export function requestsView(live) {
  let limit = PAGE;
  const fields = FILTERS.map(([name, label]) => ({
    name, label, field: el("input", { id: `by-${name}`, type: "search", size: 10, autocomplete: "off", change: () => poll.now() }),
  }));
  const state = el("select", { id: "by-state", change: () => poll.now() }, el("option", { value: "" }, "any"),
    STATES.map((each) => el("option", {}, each)));
  const errors = el("input", { id: "errors", type: "checkbox", change: () => poll.now() });
  const none = el("p", { class: "hint" }, "No request fits.");
  const more = el("button", { type: "button", class: "quiet", hidden: true, click: showMore }, "Show more");
  const made = table("Requests, the newest first", columns(), (each) => each.cursor);
  const poll = new Poll(ask, EVERY_MS);

  async function ask() {
    const query = Object.fromEntries(fields.map(({ name, field }) => [name, field.value.trim()]));
    const page = await read("requests", { ...query, state: state.value, errors: errors.checked || "", limit });
    made.show(page.data);
    setShown(none, page.data.length === 0);
    setShown(more, page.has_more && limit < MOST);
  }

  function showMore() {
    limit = Math.min(MOST, limit + PAGE);
    poll.now();
  }

  return {
    element: el(
      "section",
      { class: "card", "aria-labelledby": "requests" },
      el("div", { class: "section-head" }, el("h1", { id: "requests" }, "Requests")),
      el("div", { class: "filters" },
        fields.map(({ name, label, field }) => el("span", {}, el("label", { for: `by-${name}` }, label), field)),
        el("span", {}, el("label", { for: "by-state" }, "State"), state),
        el("span", {}, errors, el("label", { for: "errors" }, "Only errors"))),
      poll.problem, made.element, none, more,
    ),
    show() {},
    leave: () => poll.end(),
  };
}

function columns() {
  return [
    { head: "Came", kind: "brief", cell: (each) => clock(unix(each.at)) },
    { head: "Outcome", part: outcomeCell },
    { head: "Request", kind: "code", part: linkCell },
    { head: "Model", kind: "brief", cell: (each) => each.model ?? UNKNOWN },
    { head: "Backend", kind: "brief", cell: (each) => each.backend ?? UNKNOWN },
    { head: "Key", cell: (each) => each.key_id ?? UNKNOWN },
    { head: "Waited", kind: "number", cell: (each) => latency(each.waited_s) },
    { head: "First token", kind: "number", cell: (each) => latency(each.first_token_s) },
    { head: "Took", kind: "number", cell: (each) => latency(each.duration_s) },
    { head: "Input", kind: "number", cell: (each) => count(each.prompt_tokens) },
    { head: "Output", kind: "number", cell: (each) => count(each.output_tokens) },
  ];
}

function outcomeCell() {
  const badge = stateBadge();
  const why = el("span", { class: "since" });
  return {
    element: el("div", { class: "outcome" }, badge.element, " ", why),
    show(told) {
      badge.show(told.outcome ?? told.state);
      setText(why, [told.status === 200 ? null : told.status, told.shed_reason ?? told.code].filter(Boolean).join(" "));
    },
  };
}

/** An id with its middle left out: those of one gateway differ at their ends. */
function shortened(id) {
  return id.length <= LONG_ID ? id : `${id.slice(0, 4)}…${id.slice(-8)}`;
}

function linkCell() {
  const link = el("a");
  return {
    element: link,
    show(told) {
      setText(link, shortened(told.id));
      setAttribute(link, "title", told.id);
      setAttribute(link, "href", to("requests", told.id));
    },
  };
}
