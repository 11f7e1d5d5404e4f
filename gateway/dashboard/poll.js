// What one view asks for by itself, again and again while it is shown.

import { ApiError } from "./api.js";
import { el, setShown } from "./dom.js";
import { setProse } from "./prose.js";

export class Poll {
  /**
   * @param ask asks, and shows what is answered
   * @param everyMs how long to wait between
   */
  constructor(ask, everyMs) {
    this.ask = ask;
    this.everyMs = everyMs;
    this.problem = el("p", { class: "problem-text", role: "alert", hidden: true }); // why there is no answer
    this.timer = null;
    this.asking = false;
    this.again = false;
    this.ended = false;
    this.now();
  }

  /** Ask now, or once more after the answer under way, and go on from here: the last question is answered last. */
  async now() {
    this.again = true;
    if (this.asking) return;
    this.asking = true;
    clearTimeout(this.timer);
    try {
      while (this.again) await this.#askOnce();
    } finally {
      this.asking = false;
    }
    if (!this.ended) this.timer = setTimeout(() => this.now(), this.everyMs);
  }

  async #askOnce() {
    this.again = false;
    try {
      if (!document.hidden) await this.ask();
      this.#tell("");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#tell(error.message);
    }
  }

  /** Ask no more. */
  end() {
    this.ended = true;
    clearTimeout(this.timer);
  }

  #tell(text) {
    setProse(this.problem, text);
    setShown(this.problem, text !== "");
  }
}
