// Numbers and times as people read them. What is not known is a dash, never 0.

export const UNKNOWN = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 7, 1,204, 9.8k, 3.1M */
export function count(value) {
  if (!known(value)) return UNKNOWN;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Math.round(value).toLocaleString("en");
}

/** 0, 0.4, 12 */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

/** 0.07, 1,204.50; of less than a cent two digits that count: 0.000024 */
export function money(amount) {
  if (!known(amount) || amount === 0) return UNKNOWN;
  if (amount >= 0.01) return amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  return amount.toLocaleString("en", { maximumSignificantDigits: 2 });
}

/** 42 % */
export function percent(ratio) {
  return known(ratio) ? `${Math.round(ratio * 100)} %` : UNKNOWN;
}

/** 38 ms, 1.4 s */
export function latency(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

/** 8 s, 6 min, 3 h, 12 d */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

/** 14:02:11, in the reader's time zone */
export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

/** 2026-11-23 14:02:11, in the reader's time zone */
export function moment(unix) {
  const date = new Date(unix * 1000);
  const day = [date.getFullYear(), date.getMonth() + 1, date.getDate()]
    .map((part) => String(part).padStart(2, "0"))
    .join("-");
  return `${day} ${clock(unix)}`;
}

/** Seconds since the epoch of a time in RFC 3339. */
export function unix(text) {
  return Date.parse(text) / 1000;
}

/** 1 stream, 12 streams */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
