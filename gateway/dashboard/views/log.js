// The end of a launched server's log; the line that the diagnosis rests on is marked.

import { named, read } from "../api.js";
import { el, setText } from "../dom.js";
import { Poll } from "../poll.js";

const EVERY_MS = 5_000;
const MOST_BYTES = 65_536;

export function logView(id) {
  const lines = el("pre", { class: "log", tabindex: "0", "aria-label": `Log of ${id}` });
  let text = null;
  let evidence = "";
  const poll = new Poll(async () => {
    const told = await read(`backends/${named(id)}/logs`, { bytes: MOST_BYTES });
    if (told !== text) {
      text = told;
      draw();
    }
  }, EVERY_MS);

  function draw() {
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    if (!text) setText(lines, "The log is empty.");
    else lines.replaceChildren(...text.split("\n").map((line) => el(proves(line) ? "mark" : "span", {}, `${line}\n`)));
    const mark = lines.querySelector("mark");
    if (mark !== null) lines.scrollTop = mark.offsetTop - lines.offsetTop - lines.clientHeight / 2;
    else if (atEnd) lines.scrollTop = lines.scrollHeight;
  }

  function proves(line) {
    return evidence !== "" && line.includes(evidence);
  }

  return {
    element: el("section", { class: "card", "aria-labelledby": "log" }, el("h2", { id: "log" }, "Log since its start"), poll.problem, lines),
    /** Mark the lines with the evidence of a diagnosis; empty: there is none. */
    mark(of) {
      if (of === evidence) return;
      evidence = of;
      if (text !== null) draw();
    },
    leave: () => poll.end(),
  };
}
