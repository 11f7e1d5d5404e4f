// Which view the address names: `#/requests`, or `#/backends/POOL/NAME`.

/** The view's name and what follows it. */
export function place() {
  const [, name = "", ...rest] = location.hash.split("/");
  return { name: name || "overview", rest: rest.map(decoded).join("/") };
}

/** A part of an address; one that somebody wrote by hand may be no code at all, and stands for itself. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The address of a view, for a link. */
export function to(name, rest = "") {
  return `#/${name}${rest && "/"}${rest.split("/").map(encodeURIComponent).join("/")}`;
}
