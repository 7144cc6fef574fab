/* How a state looks: a shape and a word, never a colour alone. */

import { make } from "./making.js";

const SHAPES = {
  good: "●",
  wait: "◔",
  offer: "◆",
  warn: "▲",
  off: "○",
  bad: "✕",
};

const KINDS = {
  active: "good",
  ready: "good",
  live: "good",
  granted: "good",
  proven: "good",
  released: "off",
  opening: "wait",
  waiting: "wait",
  paused: "wait",
  draining: "wait",
  offered: "offer",
  revoking: "warn",
  suspended: "warn",
  noisy: "warn",
  quarantined: "bad",
  lost: "bad",
  "not proven": "bad",
  ended: "off",
};

export const kindOf = (state) => KINDS[state] || "off";

export function mark(cell, state) {
  const kind = kindOf(state);
  cell.replaceChildren(
    make(
      "span",
      { class: `mark ${kind}` },
      make("span", { class: "shape", "aria-hidden": "true", text: SHAPES[kind] }),
      state,
    ),
  );
}
