// What the page shows of one moment: now, from the overview; or an earlier one, from the last hour. Pure.

const SERVES = new Set(["ready", "degraded"]);

/** Return the pools with their backends, the verdict and the problems of the moment that is shown. */
export function snapshot(live) {
  return live.moment === null ? ofNow(live) : ofThen(live, live.history.placeOf(live.moment));
}

function ofNow({ overview, history }) {
  const last = history.times.length - 1;
  return {
    now: true,
    state: overview.verdict.state ?? overview.state,
    sentence: overview.verdict.sentence ?? overview.verdict,
    problems: overview.problems ?? [],
    place: last,
    pools: overview.pools.map((pool) => ({
      name: pool.name,
      state: pool.state,
      queued: pool.queue.requests,
      oldest: pool.queue.oldest_s,
      backends: pool.backends.map((backend) => ({
        id: backend.id,
        name: backend.name,
        state: backend.state,
        age: backend.phase_age_s,
        detail: backend.detail,
        kv: backend.kv_usage_ratio,
        running: backend.running,
        waiting: backend.waiting,
        inFlight: backend.in_flight,
        limit: backend.limit,
      })),
    })),
  };
}

/** An earlier moment: phases and figures of the last hour, and what the gateway told then. */
function ofThen({ overview, history, then }, place) {
  const pools = overview.pools.map((pool) => {
    const backends = pool.backends.map((backend) => backendThen(backend, history, place));
    const queued = at(history.pools.get(pool.name), "queued", place);
    const state = then?.pools[pool.name] ?? poolThen(backends);
    return { name: pool.name, state, queued, oldest: null, backends };
  });
  const backends = pools.flatMap((pool) => pool.backends);
  const serving = backends.filter((backend) => SERVES.has(backend.state)).length;
  return {
    now: false,
    state: then?.verdict?.state ?? worst(pools),
    sentence: then?.verdict?.sentence ?? `${serving} of ${backends.length} backends served at that moment.`,
    problems: then?.problems ?? [],
    place,
    pools,
  };
}

function backendThen(backend, history, place) {
  const track = history.backends.get(backend.id);
  const phases = track?.phase ?? [];
  const phase = phases[place] ?? null;
  let begun = place;
  while (begun > 0 && phases[begun - 1] === phase) begun -= 1;
  return {
    id: backend.id,
    name: backend.name,
    state: phase ?? "unknown",
    age: phase === null || begun === 0 ? null : (place - begun) * history.step,
    detail: "",
    kv: at(track, "kv", place),
    running: at(track, "running", place),
    waiting: at(track, "waiting", place),
    inFlight: at(track, "in_flight", place),
    limit: null,
  };
}

function poolThen(backends) {
  const serving = backends.filter((backend) => SERVES.has(backend.state)).length;
  if (backends.every((backend) => backend.state === "unknown")) return "unknown";
  if (serving === 0) return "down";
  return backends.every((backend) => backend.state === "ready") ? "ready" : "degraded";
}

function worst(pools) {
  const order = ["down", "degraded", "ready"];
  return order.find((state) => pools.some((pool) => pool.state === state)) ?? "unknown";
}

const at = (track, column, place) => track?.[column]?.[place] ?? null;
