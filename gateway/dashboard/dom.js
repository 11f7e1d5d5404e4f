// Making and changing elements. Text is always set as text: nothing here reads a string as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Attributes that are functions listen for the event of their name; null is left out. */
export function el(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

/** Make an element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return element;
}

/** Set the text of an element, unless it has that text already. */
export function setText(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Set an attribute, unless it has that value already; null takes it away. */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, String(value));
  }
}

/** Show or hide an element. */
export function setShown(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}
