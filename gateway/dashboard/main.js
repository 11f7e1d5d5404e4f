// Starts the page: who is there, which view the address names, and what it shows.

import { ApiError, read } from "./api.js";
import { el, setAttribute } from "./dom.js";
import { Live } from "./live.js";
import { login } from "./login.js";
import { place, to } from "./router.js";
import { forgetToken, token } from "./session.js";
import { themeButton } from "./theme.js";
import { backendView } from "./views/backend.js";
import { configView } from "./views/config.js";
import { keysView } from "./views/keys.js";
import { overviewView } from "./views/overview.js";
import { requestView } from "./views/request.js";
import { requestsView } from "./views/requests.js";

const VIEWS = [
  { name: "overview", title: "Overview", make: overviewView },
  { name: "requests", title: "Requests", make: (live, id) => (id ? requestView(live, id) : requestsView(live)) },
  { name: "keys", title: "Keys and usage", make: keysView },
  { name: "config", title: "Configuration", make: configView },
  { name: "backends", title: "", make: backendView },
];

const content = document.getElementById("content");
const navigation = document.getElementById("navigation");
const session = document.getElementById("session");

async function main() {
  const theme = themeButton();
  session.replaceChildren(theme);
  for (let why = ""; ; why = "The gateway no longer takes this token.") {
    const me = await signedIn(why);
    const live = new Live(me);
    session.replaceChildren(...who(live), theme);
    const left = new Promise((done) => live.addEventListener("signedout", done));
    const stop = showViews(live);
    live.start();
    await left;
    stop();
    forgetToken();
    navigation.replaceChildren();
    session.replaceChildren(theme);
  }
}

/** Return who is there; asks for a token when the gateway wants one. */
async function signedIn(why) {
  for (;;) {
    try {
      return await read("me");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401 || error.status === 403) return login(content, why);
      content.replaceChildren(el("p", { class: "stale", role: "alert" }, error.message));
      await new Promise((done) => setTimeout(done, 2_000));
    }
  }
}

function who(live) {
  const name = el("span", { class: "who", title: "Who you are here, and what you may do" }, `${live.me.name} · ${live.me.role}`);
  if (token() === null) return [name];
  const leave = () => {
    live.me = null;
    live.dispatchEvent(new Event("signedout"));
  };
  return [name, el("button", { type: "button", class: "quiet", click: leave }, "Sign out")];
}

/** Show the view that the address names, whenever something changes. Returns what ends that. */
function showViews(live) {
  const links = VIEWS.filter((view) => view.title).map((view) => el("a", { href: to(view.name) }, view.title));
  navigation.replaceChildren(...links);
  let view = null;

  function turn() {
    const { name, rest } = place();
    const found = VIEWS.find((each) => each.name === name) ?? VIEWS[0];
    view?.leave?.();
    view = found.make(live, rest);
    content.replaceChildren(view.element);
    document.title = [rest, found.title, "vllm-gateway"].filter(Boolean).join(" · ");
    links.forEach((link) => setAttribute(link, "aria-current", link.getAttribute("href") === to(found.name) ? "page" : null));
    view.show();
  }

  const show = () => view.show();
  const turned = () => {
    turn();
    content.focus({ preventScroll: true });
    scrollTo(0, 0);
  };
  addEventListener("hashchange", turned);
  live.addEventListener("change", show);
  turn();
  return () => {
    removeEventListener("hashchange", turned);
    view.leave?.();
  };
}

main();
