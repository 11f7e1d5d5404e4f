// A table whose rows stay where they are while their numbers change.

import { el, setText } from "./dom.js";
import { KeyedList } from "./keyedlist.js";

/**
 * Make a table.
 * @param caption says what it shows, for screen readers
 * @param columns of `{head, kind, cell}`: `kind` is a class of its cells, such as `number`; `cell` is a
 *   function of the row that returns text, or of nothing that returns `{element, show(row)}` (`part`)
 * @param keyOf of a row, a string that no other row has
 */
export function table(caption, columns, keyOf) {
  const body = el("tbody");
  const element = el(
    "table",
    {},
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, columns.map((column) =>
      el("th", { scope: "col", class: column.kind }, column.head)))),
    body,
  );
  const rows = new KeyedList(body, keyOf, () => row(columns));
  return { element: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, element), show: (items) => rows.show(items) };
}

function row(columns) {
  const shows = [];
  const element = el("tr", {}, columns.map((column, place) => {
    const cell = el(place === 0 ? "th" : "td", { class: column.kind, scope: place === 0 ? "row" : null });
    if (column.part) {
      const part = column.part();
      cell.append(part.element);
      shows.push((item) => part.show(item));
    } else {
      shows.push((item) => setText(cell, column.cell(item)));
    }
    return cell;
  }));
  return { element, show: (item) => shows.forEach((show) => show(item)) };
}
