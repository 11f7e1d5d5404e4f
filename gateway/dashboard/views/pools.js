// Every pool with its backends: what they do now, and did in the last hour.

import { el, setAttribute, setShown, setText } from "../dom.js";
import { UNKNOWN, clock, count, duration, latency, percent, rate, unix } from "../format.js";
import { KeyedList } from "../keyedlist.js";
import { holdOrder, orderButton } from "../orders.js";
import { to } from "../router.js";
import { spark } from "../spark.js";
import { stateBadge } from "../state.js";
import { table } from "../table.js";

const NEARLY_FULL = 0.9;
const NOT_READY_FIRST = (one, other) => (one.state === "ready") - (other.state === "ready");

export function poolsView(live) {
  const made = table(
    "Pools and their backends",
    [
      { head: "Pool, backend", kind: "name", part: nameCell },
      { head: "State", part: stateCell },
      { head: "KV cache", kind: "meter", part: kvCell },
      { head: "Running", kind: "number", cell: (row) => count(row.running) },
      { head: "Waiting", kind: "number", cell: (row) => count(row.waiting) },
      { head: "In flight", kind: "number", cell: inFlight },
      { head: "Queued", kind: "number", cell: (row) => (row.isPool ? count(row.queued) : "") },
      { head: "First token, p50", kind: "line", part: () => lineCell(live, "ttft_p50_s", latency, false) },
      { head: "Tokens / s", kind: "line", part: () => lineCell(live, "tokens", rate, true) },
    ],
    (row) => (row.isPool ? `pool ${row.name}` : row.id),
  );
  const holds = el("ul", { class: "holds" });
  const holdRows = new KeyedList(holds, (each) => String(each.pool), () => holdRow(live));
  const hold = orderButton(live, "operator", holdOrder("hold", null));
  return {
    element: el(
      "section",
      { class: "card pools", "aria-labelledby": "pools" },
      el("div", { class: "section-head" }, el("h2", { id: "pools" }, "Pools and backends"), hold),
      holds,
      made.element,
    ),
    show(shown) {
      made.show(rowsOf(shown));
      holdRows.show(live.overview.holds);
      if (hold !== null) setShown(hold, live.overview.holds.length === 0);
    },
  };
}

/** A hold of automatic restarts, with the button that lifts it. */
function holdRow(live) {
  const text = el("span");
  const element = el("li", { class: "buttons" }, text);
  return {
    element,
    show(told) {
      const whose = told.pool === null ? "of all pools" : `of ${told.pool}`;
      const until = told.until === null ? "until they are lifted" : `until ${clock(unix(told.until))}`;
      setText(text, `Automatic restarts ${whose} are on hold ${until}.`);
      if (element.children.length === 1) element.append(orderButton(live, "operator", holdOrder("lift", told.pool)) ?? "");
    },
  };
}

function rowsOf(shown) {
  const pools = [...shown.pools].sort(NOT_READY_FIRST);
  return pools.flatMap((pool) => [
    poolRow(pool, shown.place),
    ...[...pool.backends].sort(NOT_READY_FIRST).map((backend) => ({ ...backend, place: shown.place })),
  ]);
}

function poolRow(pool, place) {
  const known = (name) => pool.backends.map((backend) => backend[name]).filter((value) => value !== null);
  const total = (name) => (known(name).length ? known(name).reduce((sum, value) => sum + value, 0) : null);
  return {
    isPool: true,
    place,
    name: pool.name,
    state: pool.state,
    queued: pool.queued,
    kv: known("kv").length ? Math.max(...known("kv")) : null,
    running: total("running"),
    waiting: total("waiting"),
    inFlight: total("inFlight"),
    limit: null,
    detail: "",
    age: null,
  };
}

function inFlight(row) {
  return row.limit === null ? count(row.inFlight) : `${count(row.inFlight)} of ${count(row.limit)}`;
}

function nameCell() {
  const link = el("a");
  const plain = el("strong");
  const element = el("div");
  return {
    element,
    show(row) {
      const wanted = row.isPool ? plain : link;
      setText(wanted, row.name);
      if (!row.isPool) setAttribute(link, "href", to("backends", row.id));
      if (element.firstChild !== wanted) element.replaceChildren(wanted);
      setAttribute(element, "class", row.isPool ? "pool" : "backend");
    },
  };
}

function stateCell() {
  const badge = stateBadge();
  const since = el("span", { class: "since" });
  const element = el("div", {}, badge.element, " ", since);
  return {
    element,
    show(row) {
      badge.show(row.state);
      setText(since, row.age === null ? "" : duration(row.age));
      setAttribute(element, "title", row.detail || null);
    },
  };
}

function kvCell() {
  const value = el("span", { class: "number" });
  const used = el("i");
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, used);
  return {
    element: el("div", { class: "kv" }, bar, value),
    show(row) {
      setText(value, percent(row.kv));
      const width = `${Math.round((row.kv ?? 0) * 100)}%`;
      if (used.style.width !== width) used.style.width = width;
      setAttribute(bar, "data-tone", (row.kv ?? 0) > NEARLY_FULL ? "bad" : null);
    },
  };
}

function lineCell(live, column, told, perSecond) {
  const value = el("span", { class: "number" });
  const line = spark();
  let values = [];
  let known = -1; // the version of the history that `values` are of
  return {
    element: el("div", { class: "with-line" }, line.element, value),
    show(row) {
      const { history } = live;
      if (known !== history.version) {
        known = history.version;
        const track = row.isPool ? history.pools.get(row.name) : history.backends.get(row.id);
        values = perSecond ? history.perSecond(track, column) : track?.[column] ?? [];
      }
      setText(value, values.length ? told(values[row.place]) : UNKNOWN);
      line.show(values, live.moment === null ? null : row.place, history.version);
    },
  };
}
