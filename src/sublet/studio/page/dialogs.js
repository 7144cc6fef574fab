/* Dialogs: a question with fields, and what will happen when it is answered.
 *
 * Rules of this file:
 * - Every dialog is the browser's own modal one: the focus stays inside, Escape leaves, and the focus goes back to where it was.
 * - What fails is said in the dialog, which stays open with what was typed.
 */

import { make } from "./making.js";
import { problemParts } from "./said.js";

let number = 0;

/** fields: {name, label, value?, hint?, type?: 'text'|'select'|'check'|'number', options?, required?}. `act(values)` does it; a Problem it throws is shown.
 * Answers what `act` answered, or undefined if somebody left. */
export function ask({ title, says, fields = [], verb, danger = false, act }) {
  const id = `dialog-${(number += 1)}`;
  const before = document.activeElement;
  const problem = make("div", { role: "alert", class: "dialog-problem" });
  const go = make("button", { type: "submit", class: danger ? "danger" : "main", text: verb });
  const leave = make("button", { type: "button", text: "Cancel" });
  const inputs = new Map(fields.map((field) => [field.name, input(field, `${id}-${field.name}`)]));
  const form = make(
    "form",
    { novalidate: true },
    ...fields.map((field) => labelled(field, inputs.get(field.name), `${id}-${field.name}`)),
    problem,
    make("p", { class: "actions" }, leave, go),
  );
  const text = make(
    "div",
    { id: `${id}-says`, class: "says" },
    ...says.map((line) => make("p", { text: line })),
  );
  const dialog = make(
    "dialog",
    { "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-says` },
    make("h2", { id: `${id}-title`, text: title }),
    text,
    form,
  );
  document.body.append(dialog);

  return new Promise((over) => {
    let answer;
    let busy = false;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (busy) return;
      const missing = fields.find((field) => field.required && !inputs.get(field.name).value.trim());
      if (missing) {
        problem.replaceChildren(
          ...problemParts({
            message: `“${missing.label}” is empty`,
            remedy: missing.hint || "write it there",
          }),
        );
        inputs.get(missing.name).focus();
        return;
      }
      busy = true;
      go.setAttribute("aria-disabled", "true");
      problem.replaceChildren();
      try {
        answer = await act(
          Object.fromEntries(fields.map((field) => [field.name, valueOf(field, inputs.get(field.name))])),
        );
        dialog.close();
      } catch (error) {
        problem.replaceChildren(...problemParts(error));
      } finally {
        busy = false;
        go.removeAttribute("aria-disabled");
      }
    });
    leave.addEventListener("click", () => dialog.close());
    dialog.addEventListener("cancel", (event) => {
      if (busy) event.preventDefault();
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      const back =
        before && before.isConnected && !before.closest("[hidden]")
          ? before
          : document.querySelector("#sign-in:not([hidden]) input") || document.querySelector("#main");
      back.focus({ preventScroll: true });
      over(answer);
    });
    dialog.showModal();
    (fields.length ? inputs.get(fields[0].name) : leave).focus();
  });
}

function input(field, id) {
  const facts = {
    id,
    name: field.name,
    "aria-describedby": field.hint ? `${id}-hint` : null,
    required: Boolean(field.required),
  };
  if (field.type === "select") {
    return make(
      "select",
      facts,
      ...field.options.map(([value, text]) =>
        make("option", { value, text, selected: value === field.value }),
      ),
    );
  }
  if (field.type === "check")
    return make("input", { ...facts, type: "checkbox", checked: Boolean(field.value) });
  const made = make("input", {
    ...facts,
    type: "text",
    inputmode: field.type === "number" ? "numeric" : null,
    autocomplete: "off",
    spellcheck: "false",
  });
  made.value = field.value ?? "";
  return made;
}

function labelled(field, node, id) {
  const label = make("label", { for: id, text: field.label });
  const hint = field.hint ? make("p", { id: `${id}-hint`, class: "hint", text: field.hint }) : null;
  return make(
    "div",
    { class: field.type === "check" ? "field check" : "field" },
    ...(field.type === "check" ? [node, label] : [label, node]),
    hint,
  );
}

function valueOf(field, node) {
  return field.type === "check" ? node.checked : node.value.trim();
}
