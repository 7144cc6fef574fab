/* Time that passes: one clock for all countdowns. Nothing is drawn anew for it; a tick writes the text of the countdowns that are on the
 * screen and whose text changed.
 */

import { now, span } from "./words.js";

const all = new Set();
const seen = new Set();
const looking = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!target.isConnected) stop(target);
      else if (isIntersecting && all.has(target)) {
        seen.add(target);
        write(target);
      } else seen.delete(target);
    }
  },
  { rootMargin: "100px" },
);
const others = new Set();
let timer = 0;

/** The node shows how long it is until then; `until` 0: nothing to count. */
export function countdown(node, until, ended = "0:00") {
  if (!until) {
    stop(node);
    return;
  }
  if (node.until === until) return;
  node.until = until;
  node.ended = ended;
  if (!all.has(node)) {
    all.add(node);
    looking.observe(node);
  }
  write(node);
}

export function stop(node) {
  if (!all.delete(node)) return;
  node.until = 0;
  seen.delete(node);
  looking.unobserve(node);
}

/** Called once a second as well, until it answers false. */
export function every(act) {
  others.add(act);
}

function write(node) {
  const left = node.until - now();
  const text = left > 0 ? span(left) : node.ended;
  if (node.firstChild && node.firstChild.nodeType === Node.TEXT_NODE) {
    if (node.firstChild.data !== text) node.firstChild.data = text;
  } else node.textContent = text;
  const soon = left < 30;
  if (node.soon !== soon) {
    node.soon = soon;
    node.classList.toggle("soon", soon);
  }
}

function tick() {
  for (const node of seen) {
    if (node.isConnected) write(node);
    else stop(node);
  }
  for (const act of others) if (act() === false) others.delete(act);
}

export function start() {
  if (!timer)
    timer = setInterval(() => {
      if (!document.hidden) tick();
    }, 1000);
}
