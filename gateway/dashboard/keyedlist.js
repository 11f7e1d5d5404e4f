// The children of an element, one for each item of a list. An item keeps its element while it is in the list.

export class KeyedList {
  /**
   * @param parent the element whose children these are
   * @param keyOf of an item, a string that no other item of the list has
   * @param make of an item, `{element, show(item)}`
   */
  constructor(parent, keyOf, make) {
    this.parent = parent;
    this.keyOf = keyOf;
    this.make = make;
    this.parts = new Map();
  }

  /** Show these items in their order. Elements of other items go. */
  show(items) {
    const before = this.parts;
    this.parts = new Map();
    let place = this.parent.firstElementChild;
    for (const item of items) {
      let key = this.keyOf(item);
      while (this.parts.has(key)) key += " "; // else the element of the first would stay for ever
      const part = before.get(key) ?? this.make(item);
      before.delete(key);
      this.parts.set(key, part);
      part.show(item);
      if (part.element === place) place = place.nextElementSibling;
      else this.parent.insertBefore(part.element, place);
    }
    for (const part of before.values()) part.element.remove();
  }
}
