// The first thing on the page: how things are, in a sentence, and what to do about each problem.

import { el, setAttribute, setShown, setText } from "../dom.js";
import { clock, counted } from "../format.js";
import { KeyedList } from "../keyedlist.js";
import { setProse } from "../prose.js";
import { stateBadge, toneOf } from "../state.js";

const SHOWN = 8; // problems; the rest are counted

export function verdictView(live) {
  const badge = stateBadge();
  const when = el("span", { class: "when" });
  const sentence = el("p", { class: "sentence", role: "status", "aria-live": "polite" });
  const list = el("ul", { class: "problems", "aria-label": "Problems, the worst first" });
  const more = el("p", { class: "hint" });
  const stale = el("p", { class: "stale", role: "alert" });
  const problems = new KeyedList(list, (each) => `${each.kind} ${each.subject}`, problem);
  const element = el(
    "section",
    { class: "verdict", "aria-label": "Verdict" },
    el("h1", {}, badge.element, when), sentence, stale, list, more,
  );
  return {
    element,
    show(shown) {
      setAttribute(element, "data-tone", toneOf(shown.state));
      badge.show(shown.state);
      setText(when, shown.now ? "" : `at ${clock(live.moment)}`);
      setProse(sentence, headline(shown));
      setText(stale, live.trouble && `What you see is old. ${live.trouble}`);
      setShown(stale, live.trouble !== "");
      problems.show(shown.problems.slice(0, SHOWN).map((each) => unsaid(each, shown.sentence)));
      setShown(list, shown.problems.length > 0);
      setText(more, `And ${counted(shown.problems.length - SHOWN, "more problem")}.`);
      setShown(more, shown.problems.length > SHOWN);
    },
  };
}

/** The verdict without the cause of the first problem, which is told below it. */
function headline({ sentence, problems }) {
  const cause = problems[0]?.cause;
  return cause ? sentence.replace(` ${cause}`, "") : sentence;
}

/** A problem without what the verdict says of it already. */
function unsaid(told, verdict) {
  return verdict.includes(told.sentence) ? { ...told, sentence: "" } : told;
}

function problem() {
  const badge = stateBadge();
  const sentence = el("p", { class: "what" });
  const cause = el("p", { class: "cause" });
  const next = el("span");
  const todo = el("p", { class: "next" }, "Next: ", next);
  return {
    element: el("li", {}, badge.element, el("div", {}, sentence, cause, todo)),
    show(told) {
      badge.show(told.severity);
      setProse(sentence, told.sentence);
      setShown(sentence, Boolean(told.sentence));
      setProse(cause, told.cause);
      setShown(cause, Boolean(told.cause));
      setProse(next, told.next);
      setShown(todo, Boolean(told.next));
    },
  };
}
