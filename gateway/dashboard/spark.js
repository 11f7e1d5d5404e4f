// A small line of the last hour, in a table's cell. The number beside it says the same in words.

import { setAttribute, svg } from "./dom.js";

const WIDTH = 96;
const HEIGHT = 20;
const POINTS = 90;

/** A line; `show(values, place)` draws it, with a mark at the place of the moment that is shown. */
export function spark() {
  const line = svg("path", { class: "spark-line" });
  const mark = svg("line", { class: "spark-mark", y1: 0, y2: HEIGHT });
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    line,
    mark,
  );
  let drawn = null;
  return {
    element,
    show(values, place, version) {
      const at = place === null || values.length < 2 ? -1 : (place / (values.length - 1)) * WIDTH;
      setAttribute(mark, "x1", at.toFixed(1));
      setAttribute(mark, "x2", at.toFixed(1));
      if (drawn === version) return;
      drawn = version;
      setAttribute(line, "d", outline(thinned(values)));
    },
  };
}

/** The path of a line that begins anew behind each gap. */
export function outline(values) {
  const most = Math.max(...values.filter((value) => value !== null), 0) || 1;
  let path = "";
  let open = false;
  values.forEach((value, place) => {
    if (value !== null) {
      const x = (place / Math.max(1, values.length - 1)) * WIDTH;
      const y = HEIGHT - 1 - (value / most) * (HEIGHT - 2);
      path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      if (!open) path += "h0";
    }
    open = value !== null;
  });
  return path;
}

/** At most `POINTS` values: the largest of each few, so that a peak stays. */
function thinned(values) {
  const size = Math.ceil(values.length / POINTS);
  if (size <= 1) return values;
  const found = [];
  for (let begin = 0; begin < values.length; begin += size) {
    const known = values.slice(begin, begin + size).filter((value) => value !== null);
    found.push(known.length ? Math.max(...known) : null);
  }
  return found;
}
