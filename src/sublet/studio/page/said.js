/* What happened, said in the page and to screen readers: good news in one place, problems in another.
 *
 * Rules of this file: text goes in as text. Good news leaves by itself; a problem stays until it is put away.
 */

import { make } from "./making.js";

const STAYS_MS = 9000;
const MOST = 4;

export function say(words) {
  const line = toast("said", [words]);
  let timer = setTimeout(() => line.remove(), STAYS_MS);
  line.addEventListener("pointerenter", () => clearTimeout(timer));
  line.addEventListener("pointerleave", () => {
    timer = setTimeout(() => line.remove(), STAYS_MS / 3);
  });
}

export function sayProblem(problem) {
  toast("said-problem", problemParts(problem));
}

export function quiet() {
  for (const id of ["said", "said-problem"]) document.getElementById(id).replaceChildren();
}

function toast(place, parts) {
  const box = document.getElementById(place);
  const close = make("button", {
    type: "button",
    class: "quiet",
    "aria-label": "Put this message away",
    text: "×",
  });
  const line = make("div", { class: "toast" }, make("p", {}, ...parts), close);
  close.addEventListener("click", () => line.remove());
  const same = [...box.children].find(
    (other) => other.firstChild.textContent === line.firstChild.textContent,
  );
  if (same) same.remove(); // said again, not twice
  box.append(line);
  while (box.children.length > MOST) box.firstElementChild.remove();
  return line;
}

/** Message, then remedy, then the request's id for whoever looks into the service's log. */
export function problemParts(problem) {
  const said = String(problem.message || problem);
  const parts = [
    make("strong", { text: said.charAt(0).toUpperCase() + said.slice(1) + (/[.!?]$/.test(said) ? "" : ".") }),
  ];
  if (problem.remedy)
    parts.push(" What to do: ", problem.remedy + (/[.!?]$/.test(problem.remedy) ? "" : "."));
  if (problem.id) parts.push(" ", make("span", { class: "hint", text: `Request ${problem.id}` }));
  return parts;
}
