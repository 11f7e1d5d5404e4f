// The last hour as the gateway keeps it: one value for each step of 10 s, and null where none is known.

const KEPT = 360;

/** Columns of values for each pool and backend; all are as long as `times`. */
export class History {
  constructor() {
    this.times = []; // when each step ended, seconds since the epoch, the oldest first
    this.step = 10;
    this.pools = new Map();
    this.backends = new Map();
    this.version = 0; // grows with each merge
  }

  /** Whether an answer of `/series` goes on where this ends, by the gateway's clock; the page's may differ. */
  meets(told) {
    return told.now - firstLength(told) * told.step_s <= this.times.at(-1) + told.step_s / 2;
  }

  /** Take an answer of `/series` in. What it tells of a step replaces what was known of it. */
  merge(told) {
    const length = firstLength(told);
    const added = Array.from({ length }, (_, place) => told.now - (length - 1 - place) * told.step_s);
    const begins = added.length ? added[0] - told.step_s / 2 : Infinity;
    const kept = this.times.filter((time) => time < begins).slice(-(KEPT - length) || KEPT);
    const dropped = this.times.filter((time) => time < begins).length - kept.length;
    this.step = told.step_s;
    this.times = [...kept, ...added];
    this.pools = joined(this.pools, told.pools, dropped, kept.length, length);
    this.backends = joined(this.backends, told.backends, dropped, kept.length, length);
    this.version += 1;
  }

  /** The place of the step that a moment is in; -1 where nothing is known. */
  placeOf(moment) {
    const place = this.times.findIndex((time) => time >= moment);
    return place >= 0 ? place : this.times.length - 1;
  }

  /** A column of a pool or backend as rates a second, where it counts what a step saw. */
  perSecond(track, column) {
    return (track?.[column] ?? []).map((value) => (value === null ? null : value / this.step));
  }
}

function firstLength(told) {
  for (const track of [...Object.values(told.pools), ...Object.values(told.backends)]) {
    return track.in_flight.length;
  }
  return 0;
}

function joined(before, told, dropped, kept, added) {
  const found = new Map();
  for (const [name, columns] of Object.entries(told)) {
    const known = before.get(name);
    const track = { pool: columns.pool };
    for (const [column, values] of Object.entries(columns)) {
      if (!Array.isArray(values)) continue;
      const old = known?.[column]?.slice(dropped, dropped + kept) ?? Array(kept).fill(null);
      track[column] = [...old, ...values];
    }
    found.set(name, track);
  }
  return found;
}
