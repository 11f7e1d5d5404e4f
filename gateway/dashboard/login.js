// Asks for the admin token.

import { ApiError, read } from "./api.js";
import { el, setText } from "./dom.js";
import { forgetToken, keepToken } from "./session.js";

/** Show the form, and return who the token belongs to once the gateway has taken one. */
export function login(parent, why) {
  return new Promise((done) => {
    const field = el("input", {
      id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false",
    });
    const problem = el("p", { class: "problem-text", role: "alert" }, why);
    const form = el(
      "form",
      { class: "login card", submit },
      el("h1", {}, "Sign in"),
      el("p", {}, "Enter an admin token of this gateway: `admin.token`, one of `admin.tokens`, or a key of kind admin."),
      el("label", { for: "token" }, "Admin token"),
      field,
      problem,
      el("button", { type: "submit", class: "primary" }, "Sign in"),
      el("p", { class: "hint" }, "The token stays in this tab, and is gone when you close it."),
    );
    parent.replaceChildren(form);
    field.focus();

    async function submit(event) {
      event.preventDefault();
      keepToken(field.value.trim());
      try {
        done(await read("me"));
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        forgetToken();
        setText(problem, error.status === 401 ? "The gateway does not know this token." : error.message);
        field.select();
      }
    }
  });
}
