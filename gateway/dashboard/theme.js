// Light or dark: as the system says, until the reader chooses.

import { el, setText } from "./dom.js";

const NAME = "vllm-gateway.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export function dark() {
  const chosen = localStorage.getItem(NAME);
  return chosen === null ? system.matches : chosen === "dark";
}

/** Call when light becomes dark, or dark light. Returns what ends that. */
export function onTheme(listener) {
  document.addEventListener("theme", listener);
  return () => document.removeEventListener("theme", listener);
}

/** Put the theme on the page, and return the button that changes it. */
export function themeButton() {
  const button = el("button", { type: "button", class: "quiet", click: toggle });
  const show = () => {
    document.documentElement.dataset.theme = dark() ? "dark" : "light";
    setText(button, dark() ? "Light" : "Dark");
    button.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours");
    document.dispatchEvent(new Event("theme"));
  };
  function toggle() {
    localStorage.setItem(NAME, dark() ? "light" : "dark");
    show();
  }
  system.addEventListener("change", show);
  show();
  return button;
}
