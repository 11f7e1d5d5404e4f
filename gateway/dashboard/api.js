// Calls of the admin API.

import { token } from "./session.js";

const PREFIX = "/admin/v1/";
const PATIENCE_MS = 15_000;
const MOST_ROWS = 10_000;

/** An answer that is no success. `status` 0: nobody answered. */
export class ApiError extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

/** Return the JSON, or the text, that a path answers. Throws ApiError. */
export function read(path, query = {}) {
  return call("GET", path, query);
}

/** Return the rows of all pages of a list, up to `MOST_ROWS`. Throws ApiError. */
export async function readAll(path, query = {}) {
  const rows = [];
  for (let after = null; ;) {
    const page = await read(path, { ...query, after });
    rows.push(...page.data);
    if (!page.has_more || rows.length >= MOST_ROWS) return rows;
    after = page.last_id;
  }
}

/** Give an order; sent again with the same `once`, it is answered again and not done again. Throws ApiError. */
export function order(path, body, once, patienceMs = PATIENCE_MS) {
  return call("POST", path, {}, body, { "idempotency-key": once }, patienceMs);
}

/** Return a text that nobody else has. */
export function unique() {
  return crypto.getRandomValues(new Uint32Array(4)).join("-");
}

/** Return a name as a part of a path. The slash of POOL/NAME stays. */
export function named(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}

/** Return a text as a header can hold it: each of its bytes in UTF-8 as one character. */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function call(method, path, query, body, more = {}, patienceMs = PATIENCE_MS) {
  const headers = { ...more };
  if (token() !== null) headers.authorization = `Bearer ${utf8(token())}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== "");
  const asked = given.length ? `?${new URLSearchParams(given)}` : "";
  let reply, told;
  try {
    reply = await fetch(PREFIX + path + asked, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(patienceMs),
    });
    const json = (reply.headers.get("content-type") ?? "").includes("json");
    told = await (json ? reply.json() : reply.text()); // which may be cut
  } catch {
    throw new ApiError(0, "unreachable", "The gateway does not answer. This page keeps asking.");
  }
  if (!reply.ok) throw new ApiError(reply.status, told.code ?? "", told.detail ?? reply.statusText);
  return told;
}
