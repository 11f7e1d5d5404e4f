// A chart of the last hour. Its time axis, its events and its cursor are those of the other charts.

import { el, setText } from "./dom.js";
import { clock, count } from "./format.js";
import { onTheme } from "./theme.js";

const HEIGHT = 132;
// Steps of an axis that counts: half a request would be written as a whole one.
const WHOLE = Array.from({ length: 10 }, (_, digits) => [1, 2, 5].map((step) => step * 10 ** digits)).flat();
const TOGETHER = "last hour"; // charts with this key share their cursor

/**
 * Make a chart.
 * @param title what it shows
 * @param lines of `{label, colour}`; a colour is the name of a property of the style sheet
 * @param told how a value is written
 * @param chosen called with the time that is clicked on
 */
export function chart({ title, lines, told, chosen }) {
  const values = lines.map(() => el("b", { class: "number" }));
  const key = lines.map((line, place) =>
    el("span", { class: "key" }, el("i", { class: `swatch ${line.colour}` }), `${line.label} `, values[place]));
  const box = el("div", { class: "plot", role: "img", "aria-label": `${title}: nothing is known yet.` });
  const element = el("figure", { class: "chart" }, el("figcaption", {}, el("span", { class: "title" }, title), ...key), box);
  const marks = { events: [], moment: null };
  let plot = null;
  let data = [[], ...lines.map(() => [])];

  function draw() {
    plot?.destroy();
    plot = new window.uPlot(options(box, lines, told, marks), data, box);
    plot.over.addEventListener("click", () => chosen(plot.posToVal(plot.cursor.left, "x")));
  }

  const forgetTheme = onTheme(() => plot && draw());
  const resized = new ResizeObserver(() => {
    if (plot && box.clientWidth) plot.setSize({ width: box.clientWidth, height: HEIGHT });
  });
  resized.observe(box);

  return {
    element,
    /** Show columns of values; `place` is that of the moment whose values are written out. */
    show(times, columns, place, events, moment) {
      data = [times, ...columns];
      Object.assign(marks, { events, moment });
      values.forEach((value, each) => setText(value, told(columns[each][place] ?? null)));
      const words = lines.map((line, each) => `${line.label} ${values[each].textContent}`);
      box.setAttribute("aria-label", `${title} over the last hour. Shown: ${words.join(", ")}.`);
      if (plot === null) draw();
      else plot.setData(data);
    },
    /** Let go of it: the theme, and the charts that share its cursor, hold it until then. */
    leave() {
      forgetTheme();
      resized.disconnect();
      plot?.destroy();
    },
  };
}

function options(box, lines, told, marks) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width: box.clientWidth || 400,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: TOGETHER }, drag: { x: false, y: false }, points: { size: 6 } },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, size: 24, space: 70, values: timesTold },
      { ...axis, size: 56, space: 34, incrs: told === count ? WHOLE : undefined, values: (_, found) => found.map((value) => told(value)) },
    ],
    series: [{}, ...lines.map((line) => ({ stroke: colour(line.colour), width: 1.5, points: { show: tooShort, size: 5 } }))],
    hooks: { draw: [(plot) => drawMarks(plot, marks, colour)] },
  };
}

/** Times on the axis, with seconds if it is short. */
function timesTold(plot, times) {
  const { min, max } = plot.scales.x;
  return times.map((time) => (max - min < 300 ? clock(time) : clock(time).slice(0, 5)));
}

/** Whether there are too few values for a line to be seen. */
function tooShort(plot) {
  return plot.data[0].length < 4;
}

/** Draw a line where something happened, and one at the moment that is shown. */
function drawMarks(plot, { events, moment }, colour) {
  const { ctx, bbox } = plot;
  const upright = (time, style, dashes) => {
    const x = plot.valToPos(time, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.strokeStyle = style;
    ctx.setLineDash(dashes);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  };
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const event of events) upright(event.at, colour("warn"), [3, 3]);
  if (moment !== null) upright(moment, colour("accent"), []);
  ctx.restore();
}
