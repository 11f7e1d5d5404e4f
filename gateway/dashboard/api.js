// Calls of the admin API.

import { token } from "./session.js";

const PREFIX = "/admin/v1/";
const PATIENCE_MS = 15_000;

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

/** Give an order. Throws ApiError. */
export function order(path, body) {
  return call("POST", path, {}, body);
}

/** Return a name as a part of a path. The slash of POOL/NAME stays. */
export function named(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}

async function call(method, path, query, body) {
  const headers = {};
  if (token() !== null) headers.authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== "");
  const asked = given.length ? `?${new URLSearchParams(given)}` : "";
  let reply;
  try {
    reply = await fetch(PREFIX + path + asked, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch {
    throw new ApiError(0, "unreachable", "The gateway does not answer. This page keeps asking.");
  }
  const json = (reply.headers.get("content-type") ?? "").includes("json");
  const told = await (json ? reply.json() : reply.text());
  if (!reply.ok) throw new ApiError(reply.status, told.code ?? "", told.detail ?? reply.statusText);
  return told;
}
