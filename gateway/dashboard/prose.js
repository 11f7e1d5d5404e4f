// Sentences of the gateway, whose commands and settings stand between backticks.

import { el } from "./dom.js";

/** Set a sentence; what stands between backticks is shown as code. */
export function setProse(element, text) {
  const wanted = String(text ?? "");
  if (element.dataset.prose === wanted) return;
  element.dataset.prose = wanted;
  element.replaceChildren(...wanted.split("`").map((part, place) => (place % 2 ? el("code", {}, part) : part)));
}
