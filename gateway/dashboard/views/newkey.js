// The form that makes a key.

import { el } from "../dom.js";
import { giveOrder } from "../orders.js";

/** A field for the name and a button; `made` is called once there is a key. */
export function newKey(live, made) {
  const name = el("input", { id: "key-name", type: "text", required: true, maxlength: 100, autocomplete: "off" });
  return el(
    "form",
    { class: "buttons", submit },
    el("label", { for: "key-name" }, "New key for"),
    name,
    el("button", { type: "submit", class: "quiet" }, "Make a key"),
  );

  function submit(event) {
    event.preventDefault();
    giveOrder(live, {
      label: "Make a key",
      title: `A key for ${name.value}`,
      path: "keys",
      body: { name: name.value },
      told: (answer) => (answer.key === null
        ? "A key of kind inference, with the limits of the defaults. `vllm-gateway keys create` takes all settings."
        : "This is the key. It is shown this once:"),
      done: (answer, effect) => {
        effect.append(el("code", { class: "secret" }, answer.key));
        name.value = "";
        made();
      },
    });
  }
}
