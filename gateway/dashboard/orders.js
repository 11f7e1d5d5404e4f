// Orders: each is tried first, so that its dialog says what it would do, and carried out once that is confirmed.
// One that cannot be tried says so itself.

import { ApiError, named, order, unique } from "./api.js";
import { el, setAttribute, setShown } from "./dom.js";
import { setProse } from "./prose.js";

/** A button that gives an order; null when the user's role does not allow it. */
export function orderButton(live, role, wanted) {
  if (!live.may(role)) return null;
  return el("button", { type: "button", class: wanted.danger ? "quiet danger-text" : "quiet", click: () => giveOrder(live, wanted) }, wanted.label);
}

/**
 * Buttons for orders about the row of a table, which changes.
 * @param offers of `{label, order, fits}`: `order` makes one for a row, and `fits` tells whether it is offered
 * @param nameOf of a row, for those who do not see where the button stands
 */
export function rowOrders(live, offers, nameOf) {
  let row = null;
  const made = offers.map(({ label, order: orderOf, fits }) => ({
    label,
    fits,
    button: el("button", { type: "button", class: "quiet", click: () => giveOrder(live, orderOf(row)) }, label),
  }));
  return {
    element: el("div", { class: "buttons" }, made.map((each) => each.button)),
    show(shown) {
      row = shown;
      for (const { label, fits, button } of made) {
        setShown(button, fits(shown));
        setAttribute(button, "aria-label", `${label} ${nameOf(shown)}`);
      }
    },
  };
}

/** The order of a verb for a backend. */
export function backendOrder(verb, label, id, danger = false) {
  return {
    label,
    title: `${label} ${id}`,
    danger,
    path: `backends/${named(id)}:${verb}`,
    told: (answer) => answer.sentence,
    needsForce: (answer) => answer.last && answer.would_change,
    forced: "Do it although no other backend of this pool serves.",
  };
}

/** The order to hold or to lift automatic restarts; pool null: of all. */
export function holdOrder(verb, pool) {
  const whose = pool === null ? "of all pools" : `of the pool ${pool}`;
  const effect = verb === "hold"
    ? `The gateway restarts no backend ${whose} by itself, until you lift the hold.`
    : `The gateway restarts ailing backends ${whose} by itself again.`;
  const label = verb === "hold" ? "Hold automatic restarts" : "Lift the hold";
  return { label, title: `${label} ${whose}`, path: `restarts:${verb}`, body: { pool }, told: () => effect };
}

/**
 * Try an order, show what it would do, and carry it out if that is confirmed.
 * @param wanted `{label, title, path, body, told, danger, needsForce, forced, done, untried, patienceMs}`: `told` makes
 *   a sentence of an answer, `done` may put more into the dialog once it is carried out, and `untried` is what an order
 *   does that cannot be tried
 */
export async function giveOrder(live, wanted) {
  const effect = el("p", { class: "effect", role: "status", "aria-live": "polite" }, "Asking what it would do …");
  const reason = el("input", { id: "reason", type: "text", maxlength: 500, autocomplete: "off" });
  const force = el("input", { id: "force", type: "checkbox", change: () => ready() });
  const forceRow = el("p", { hidden: true }, force, " ", el("label", { for: "force" }, wanted.forced ?? "Do it nevertheless."));
  const confirm = el("button", { type: "button", class: wanted.danger ? "danger" : "primary", disabled: true, click: carryOut }, wanted.label);
  const close = el("button", { type: "button", click: () => dialog.close() }, "Cancel");
  const asked = el("div", {}, el("label", { for: "reason" }, "Reason, for the audit log"), reason);
  const dialog = el(
    "dialog",
    { class: "order", "aria-labelledby": "order-title", close: () => dialog.remove() },
    el("h2", { id: "order-title" }, wanted.title), effect, asked, forceRow,
    el("div", { class: "buttons" }, close, confirm),
  );
  document.body.append(dialog);
  dialog.showModal();
  let tried = false;
  const keys = new Map(); // by what is sent: an order whose answer was lost is not given twice

  function ready() {
    confirm.disabled = !tried || (!forceRow.hidden && !force.checked);
  }

  async function attempt(body) {
    const sent = { ...wanted.body, ...body };
    const text = JSON.stringify(sent);
    if (!keys.has(text)) keys.set(text, unique());
    try {
      return await order(wanted.path, sent, keys.get(text), wanted.patienceMs);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 0 && error.code !== "idempotency_key_in_use") keys.delete(text); // it was answered
      setProse(effect, error.message);
      effect.dataset.tone = "bad";
      setShown(forceRow, error.code === "last_backend");
      return null;
    }
  }

  async function carryOut() {
    confirm.disabled = true;
    const forced = force.checked ? { force: true } : {};
    if (wanted.untried) setProse(effect, "Being carried out …");
    const answer = await attempt({ reason: reason.value, ...forced });
    if (answer === null) return ready();
    effect.dataset.tone = "good";
    setProse(effect, `Done. ${wanted.told(answer)}`);
    wanted.done?.(answer, effect);
    asked.remove();
    forceRow.remove();
    confirm.remove();
    close.textContent = "Close";
    close.focus();
    await live.refresh();
  }

  if (wanted.untried) {
    setProse(effect, wanted.untried);
  } else {
    const answer = await attempt({ dry_run: true });
    if (answer === null) return;
    setProse(effect, wanted.told(answer));
    setShown(forceRow, Boolean(wanted.needsForce?.(answer)));
  }
  tried = true;
  ready();
}
