/* One session: what it is, and a few lines of code run in it.
 *
 * Rules of this file:
 * - What runs prints as it runs. A cut in the middle is taken up again with the same call: it is not run twice.
 * - Output is text, or a picture that came as bytes. HTML that code shows is not drawn.
 */

import { lines, open, Problem, send } from "./api.js";
import * as acts from "./acts.js";
import { make, setHidden, setText } from "./making.js";
import { mark } from "./marks.js";
import { problemParts, say, sayProblem } from "./said.js";
import { buttons } from "./tables.js";
import { countdown, stop } from "./ticks.js";
import { clock, count, money, size, some, span, text, took } from "./words.js";

const MOST_TEXT = 200_000;
const TRIES = 6;
const PICTURES = ["image/png", "image/jpeg"];

const FACTS = [
  ["Status", (s) => s.status],
  ["Time left", (s) => (s.expires_at && ["active", "revoking"].includes(s.status) ? "" : "-")],
  [
    "VRAM",
    (s) =>
      s.granted_bytes && s.granted_bytes !== s.vram_bytes
        ? `${size(s.granted_bytes)} (asked ${size(s.vram_bytes)})`
        : size(s.vram_bytes),
  ],
  ["Tier", (s) => s.tier],
  ["Device", (s) => text((s.devices || []).join(", "))],
  ["Waits", (s) => (s.wait ? waits(s.wait) : "-")],
  ["Why", (s) => [s.reason, s.detail].filter(Boolean).join(": ") || "-"],
  ["Checkpoint", (s) => text(s.checkpoint)],
  ["Opened", (s) => clock(s.opened_at)],
  ["Unused it goes after", (s) => span(s.warm_seconds || s.ttl_seconds)],
  ["GPU time", (s) => took(s.usage?.gpu_seconds)],
  ["Cost", (s) => money(s.usage?.cost)],
  ["Waited", (s) => took(s.usage?.wait_seconds)],
  [
    "Calls, launches, errors",
    (s) => `${count(s.usage?.calls)}, ${count(s.usage?.launches)}, ${count(s.usage?.errors)}`,
  ],
  ["Saved", (s) => size(s.usage?.checkpoint_bytes)],
  ["Leases so far", (s) => count(s.usage?.leases)],
  ["Lease", (s) => text(s.lease_id)],
  ["Session", (s) => s.id],
];

export const waits = (wait) =>
  `place ${wait.position}${Number.isFinite(wait.eta_seconds) ? `, about ${span(wait.eta_seconds)}` : ""}${wait.reason ? `: ${wait.reason}` : ""}`;

export class Console {
  constructor() {
    this.title = make("h1", { tabindex: "-1" });
    this.able = make("div", { class: "does" });
    this.facts = new Map(FACTS.map(([name]) => [name, make("dd", {})]));
    const list = make(
      "dl",
      { class: "facts" },
      ...FACTS.map(([name]) => make("div", {}, make("dt", { text: name }), this.facts.get(name))),
    );
    this.code = make("textarea", {
      id: "code",
      rows: "6",
      spellcheck: "false",
      autocapitalize: "off",
      "aria-describedby": "code-hint",
    });
    this.go = make("button", { type: "submit", class: "main", text: "Run" });
    this.halt = make("button", { type: "button", text: "Interrupt", hidden: true });
    this.wipe = make("button", { type: "button", class: "quiet", text: "Clear the output" });
    this.note = make("p", { id: "code-hint", class: "hint" });
    this.out = make("div", { class: "out", role: "log", tabindex: "0", "aria-label": "Output" });
    this.form = make(
      "form",
      {},
      make("label", { for: "code", text: "Python, run in the session's own worker" }),
      this.code,
      this.note,
      make("p", { class: "actions" }, this.go, this.halt, this.wipe),
    );
    this.gone = make(
      "p",
      { class: "empty" },
      "There is no such session here. It may have been ended and forgotten. ",
      make("a", { href: "#studio", text: "Back to the studio" }),
      ".",
    );
    this.body = make(
      "div",
      { class: "session" },
      make(
        "section",
        { "aria-labelledby": "facts-title", class: "card" },
        make("h2", { id: "facts-title", text: "What it is" }),
        list,
      ),
      make(
        "section",
        { "aria-labelledby": "code-title", class: "card" },
        make("h2", { id: "code-title", text: "Run code" }),
        this.form,
        this.out,
      ),
    );
    this.node = make("div", {}, make("div", { class: "head" }, this.title, this.able), this.gone, this.body);
    this.outputs = new Map(); // of each session looked at, while the page is open
    this.running = new Map();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.code.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    });
    this.halt.addEventListener("click", () => this.interrupt());
    this.wipe.addEventListener("click", () => {
      this.outputs.delete(this.id);
      this.out.replaceChildren();
    });
    this.able.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-act]");
      if (button) acts[button.dataset.act](this.session);
    });
  }

  show(id, session, me) {
    if (this.id !== id) {
      this.id = id;
      this.code.value = "";
      this.out.replaceChildren(...(this.outputs.get(id) || []));
    }
    this.session = session;
    this.me = me;
    setHidden(this.gone, Boolean(session));
    setHidden(this.body, !session);
    setText(this.title, session ? `Session ${acts.nameOf(session)}` : "Session");
    buttons(this.able, session ? can(session, me) : []);
    if (session) {
      for (const [name, words] of FACTS) {
        const cell = this.facts.get(name);
        const value = words(session);
        if (name === "Status") {
          if (cell.state !== value) {
            cell.state = value;
            mark(cell, value);
          }
        } else if (name === "Time left" && value === "") countdown(cell, session.expires_at);
        else {
          stop(cell);
          setText(cell, value);
        }
      }
    }
    this.able_to_run();
  }

  able_to_run() {
    const busy = this.running.has(this.id);
    const own = this.session && this.session.tenant === this.me?.tenant;
    const able = own && this.session.status === "active";
    if (!busy && document.activeElement === this.halt) this.code.focus();
    setHidden(this.halt, !busy);
    this.go.setAttribute("aria-disabled", String(busy || !able)); // not `disabled`, which would lose the focus
    setText(
      this.note,
      this.session && !own
        ? `It is ${this.session.tenant}'s: only they run code in it.`
        : !this.session || able
          ? "Ctrl+Enter runs it. Names stay for the next run, as long as the lease lives."
          : `It has no GPU now (${this.session.status}): ${hint(this.session)}`,
    );
  }

  async run() {
    const code = this.code.value;
    const { id } = this;
    if (!code.trim()) return;
    if (this.go.getAttribute("aria-disabled") === "true") {
      say(
        this.running.has(id)
          ? "Not run: the last code still runs. Wait for it, or interrupt it; what you typed stays."
          : `Not run: ${this.note.textContent}`,
      );
      return;
    }
    const random = [...crypto.getRandomValues(new Uint8Array(6))];
    const call = `page-${random.map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    const piece = make("div", { class: "ran" });
    const screen = { shown: make("div", {}), length: 0 };
    piece.append(make("pre", { class: "asked", text: code.trimEnd() }), screen.shown);
    this.outputs.set(id, [...(this.outputs.get(id) || []), piece].slice(-50));
    if (this.id === id) this.out.append(piece);
    this.running.set(id, call);
    this.able_to_run();
    try {
      await this.follow(id, call, code, screen);
    } catch (problem) {
      screen.shown.append(make("p", { class: "problem" }, ...problemParts(problem)));
    } finally {
      this.running.delete(id);
      this.able_to_run();
      if (this.id === id) this.out.scrollTop = this.out.scrollHeight;
    }
  }

  async follow(id, call, code, screen) {
    for (let attempt = 0; ; attempt++) {
      try {
        const answer = await open("POST", `v1/sessions/${encodeURIComponent(id)}/run`, {
          body: { code, call },
        });
        screen.shown.replaceChildren(); // a call that is taken up again tells everything again
        screen.length = 0;
        for await (const line of lines(answer)) {
          if (line && this.take(JSON.parse(line), screen, id)) return;
        }
        throw new Problem({ code: "disconnected", message: "the connection was cut while it ran" });
      } catch (problem) {
        const cut = !(problem instanceof Problem) || problem.code === "disconnected";
        if (!cut || attempt >= TRIES) throw problem;
        if (attempt === 0) say("The connection was cut. The code goes on; it is taken up again.");
        await new Promise((over) => setTimeout(over, Math.min(8000, 500 * 2 ** attempt)));
      }
    }
  }

  /** True when it is over. */
  take(event, screen, id) {
    if (event.kind === "text") print(screen, event.text, event.stream === "stderr" ? "err" : "std");
    else if (event.kind === "display" || event.kind === "result") display(screen, event.data || {});
    else if (event.kind === "error") print(screen, trace(event), "err");
    else if (event.kind === "failed" && event.error?.code === "disconnected") throw new Problem(event.error);
    else if (event.kind === "failed") {
      screen.shown.append(
        make("p", { class: "problem" }, ...problemParts(event.error || { message: "it failed" })),
      );
      return true;
    } else if (event.kind === "done") {
      const said = [
        Number.isFinite(event.seconds) ? took(event.seconds) : "",
        event.launches ? some(event.launches, "launch", "launches") : "",
      ]
        .filter(Boolean)
        .join(" · ");
      screen.shown.append(make("p", { class: "hint", text: said ? `Done in ${said}` : "Done" }));
      return true;
    }
    if (this.id === id) this.out.scrollTop = this.out.scrollHeight;
    return false;
  }

  async interrupt() {
    const call = this.running.get(this.id);
    if (!call) return;
    try {
      await send("POST", `v1/sessions/${encodeURIComponent(this.id)}/interrupt`, { call });
      say("Interrupted.");
    } catch (problem) {
      sayProblem(problem);
    }
  }
}

const hint = (session) =>
  ({
    suspended: "resume it to run code again.",
    waiting: "code can be run when it has one.",
    offered: "answer the offer, or wait.",
    opening: "in a moment.",
    revoking: "it is being taken back.",
    ended: "open another one.",
  })[session.status] || "";

/** What its owner, or an operator, may do with a session now. */
export function can(session, me) {
  const named = (act, words, style) => ({
    act,
    text: words,
    class: style,
    label: `${words} ${acts.nameOf(session)}`,
  });
  const able = [];
  if (session.status === "ended") return able;
  const own = !me || session.tenant === me.tenant;
  if (session.status === "offered" && own)
    able.push(named("accept", "Accept", "main"), named("decline", "Decline"));
  if (session.status === "suspended" && own) able.push(named("resume", "Resume", "main"));
  if (own) able.push(named("end", "End"));
  return able;
}

function print(screen, words, style) {
  let last = screen.shown.lastElementChild;
  if (!last || last.dataset.stream !== style) {
    last = make("pre", { class: style });
    last.dataset.stream = style;
    screen.shown.append(last);
  }
  last.append(String(words));
  screen.length += String(words).length;
  while (screen.length > MOST_TEXT && screen.shown.firstChild) {
    // the oldest goes: a page is no log file
    const first = screen.shown.firstElementChild;
    const piece = first.firstChild;
    if (!piece || (first === last && piece === last.lastChild)) break;
    screen.length -= piece.textContent.length;
    piece.remove();
    if (!first.firstChild) first.remove();
  }
}

function display(screen, data) {
  const kind = PICTURES.find((name) => data[name]);
  if (kind) {
    const bytes = typeof data[kind] === "string" ? data[kind] : data[kind].base64;
    const picture = make("img", { alt: String(data["text/plain"] || "a picture the code drew") });
    picture.src = `data:${kind};base64,${String(bytes).replace(/\s/g, "")}`;
    screen.shown.append(picture);
  } else if (data["text/plain"] !== undefined) print(screen, `${data["text/plain"]}\n`, "std");
}

function trace(event) {
  const found = Array.isArray(event.traceback) ? event.traceback.join("\n") : event.traceback;
  const words = found || `${event.name || "Error"}: ${event.message || ""}`;
  return `${String(words)
    .replace(/\x1b\[[0-9;]*m/g, "")
    .trimEnd()}\n`;
}
