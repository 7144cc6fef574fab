/* What several views are made of: sections with a heading, columns for a state, a share as a bar. */

import { make } from "./making.js";
import { mark } from "./marks.js";
import { percent } from "./words.js";

/** States of a lease or a session in which it has a device. */
export const HOLDS = ["active", "revoking"];

export function section(id, title, ...children) {
  return titled(id, title, [], ...children);
}

/** With buttons beside its heading. */
export function titled(id, title, beside, ...children) {
  const heading = make("h2", { id: `${id}-title`, text: title });
  const head = beside.length ? make("div", { class: "head" }, heading, ...beside) : heading;
  return make("section", { class: `card at-${id}`, "aria-labelledby": `${id}-title` }, head, ...children);
}

/** A column that shows a state. */
export const marked = (name, stateOf) => ({
  name,
  value: stateOf,
  draw: (cell, row) => mark(cell, stateOf(row)),
});

/** The button that takes a lease back, for operators and while there is something to take. */
export const revocable = (operator, live, name) =>
  operator && live ? [{ act: "revoke", text: "Revoke", label: `Revoke the lease of ${name}` }] : [];

export const code = (words) => make("code", { text: words });

export function meter(cell, share) {
  if (!Number.isFinite(share)) {
    cell.replaceChildren("-");
    return;
  }
  const bar = make("span", { class: "share", "aria-hidden": "true" }, make("i", {}));
  bar.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
  cell.replaceChildren(bar, percent(share));
}
