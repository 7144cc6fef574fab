/* The page's one loop: sign in, fetch the dashboard, show the view that is looked at, and again when something happened.
 *
 * Rules of this file:
 * - Events ask for a dashboard, at most one each second. How long the page took to show it stands in `window.__sublet_updates`.
 * - Signing out forgets the token and everything that was shown.
 */

import * as api from "./api.js";
import * as acts from "./acts.js";
import { Live } from "./live.js";
import { make, setHidden, setText } from "./making.js";
import { readDashboard } from "./reading.js";
import { problemParts, quiet, say, sayProblem } from "./said.js";
import * as ticks from "./ticks.js";
import { VIEWS } from "./views.js";
import { clock, now, setClock, size } from "./words.js";

const APART_MS = 1000;
const AFTER_PROBLEM_MS = 4000;
const ANYWAY_MS = 15_000; // usage grows without an event
const UNANSWERED_MS = 30_000; // then the question is asked again: a page that waits for an answer shows nothing new
const KEPT = 200;

const updates = (window.__sublet_updates = []);
const by = (id) => document.getElementById(id);
const place = by("dashboard");
let views = new Map();
let dashboard = null;
let shown = null;
let statuses = new Map();
let soonest = Infinity;

// the dashboard

class Refresher {
  constructor() {
    this.reset();
  }

  reset() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.last = -Infinity;
    this.wanted = this.busy = false;
    this.round = (this.round || 0) + 1;
  }

  /** Soon: now if the last one is a second ago, else when it is. */
  ask() {
    this.wanted = true;
    if (this.timer || this.busy || !api.signedIn()) return;
    this.timer = setTimeout(() => this.fetch(), Math.max(0, this.last + APART_MS - performance.now()));
  }

  async fetch() {
    this.timer = 0;
    if (document.hidden && dashboard) return undefined; // asked again when somebody looks
    const { round } = this;
    this.wanted = false;
    this.busy = true;
    this.last = performance.now();
    try {
      const found = await api.get("v1/dashboard", { signal: AbortSignal.timeout(UNANSWERED_MS) });
      if (round === this.round) show(found);
    } catch (problem) {
      this.last += AFTER_PROBLEM_MS;
      if (round === this.round && dashboard && problem.status !== 401) {
        this.wanted = true; // what it was asked for is still not shown
        if (problem.code !== "disconnected") sayProblem(problem);
      }
      return problem;
    } finally {
      if (round === this.round) {
        this.busy = false;
        if (this.wanted) this.ask();
      }
    }
    return undefined;
  }
}

const refresher = new Refresher();
acts.whenDone(() => refresher.ask());

function show(found) {
  setClock(found.at);
  const began = performance.now();
  const first = !dashboard;
  dashboard = readDashboard(found);
  if (first) build();
  apply();
  const applied = performance.now();
  void document.body.offsetHeight; // the layout is part of what an update costs
  const over = performance.now();
  updates.push({
    at: found.at,
    id: found.id,
    ms: over - began,
    apply_ms: applied - began,
    leases: dashboard.leases.length,
    view: shown,
  });
  if (updates.length > KEPT) updates.shift();
  tellChanges();
  soonest = nextEnd();
  if (first) live.start(dashboard.id);
}

/** The next instant at which something ends by the clock alone: there may be no event for it. */
function nextEnd() {
  const ends = [
    ...dashboard.leases.map((lease) => lease.ends_at),
    ...dashboard.sessions.map((session) => session.offer?.until),
  ];
  return Math.min(...ends.filter((at) => at > now()));
}

function apply() {
  views.get(shown)?.show(dashboard);
}

/** What became of one's own sessions, in a sentence each. */
function tellChanges() {
  const before = statuses;
  statuses = new Map();
  for (const session of dashboard.sessions) {
    if (session.tenant !== dashboard.me.tenant) continue;
    statuses.set(session.id, session.status);
    const was = before.get(session.id);
    if (!was || was === session.status) continue;
    const name = acts.nameOf(session);
    const why = [session.reason, session.detail].filter(Boolean).join(": ");
    if (session.status === "active") say(`${name} has a GPU now: ${size(session.granted_bytes)}.`);
    else if (session.status === "offered") say(`Offer for ${name}: ${acts.offerWords(session.offer || {})}.`);
    else if (session.status === "revoking")
      say(`${name} is being taken back${why ? `: ${why}` : ""}. Save what you need.`);
    else if (session.status === "suspended")
      say(`${name} lost its GPU${why ? ` (${why})` : ""}. Resume it to go on.`);
  }
}

// views

function build() {
  const operator = dashboard.me.scope === "operator";
  views = new Map();
  place.replaceChildren();
  for (const { name, view: View } of VIEWS) {
    const view = new View({ operator });
    view.node.hidden = true;
    views.set(name, view);
    place.append(view.node);
  }
  const nav = by("views");
  nav.replaceChildren(
    make(
      "ul",
      {},
      ...VIEWS.filter(({ words }) => words).map(({ name, words }) =>
        make("li", {}, make("a", { href: `#${name}`, text: words })),
      ),
    ),
  );
  setText(by("me"), operator ? `${dashboard.me.tenant} (operator)` : dashboard.me.tenant);
  for (const id of ["views", "me", "live", "sign-out", "dashboard"]) setHidden(by(id), false);
  setHidden(by("sign-in"), true);
  go(false);
}

/** To the view the address names. */
function go(move = true) {
  if (!dashboard) return;
  const [name, of = ""] = location.hash.slice(1).split("/");
  shown = views.has(name) && (name !== "session" || of) ? name : "studio";
  for (const [other, view] of views) setHidden(view.node, other !== shown);
  if (shown === "session") {
    try {
      views.get("session").of = decodeURIComponent(of);
    } catch {
      views.get("session").of = of;
    }
  }
  for (const link of by("views").querySelectorAll("a")) {
    if (link.hash === `#${shown}` || (shown === "session" && link.hash === "#studio"))
      link.setAttribute("aria-current", link.hash === `#${shown}` ? "page" : "true");
    else link.removeAttribute("aria-current");
  }
  apply();
  const view = views.get(shown);
  document.title = `${view.title.textContent} · sublet studio`;
  if (move) {
    view.title.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

// live or not

let state = "";
const live = new Live({
  tell(now_, problem) {
    if (now_ === "live" && state === "cut") say("Live again.");
    if (now_ === "live" && state !== "live") refresher.ask(); // whatever was missed
    if (problem && problem.code !== "disconnected" && problem.status !== 401) sayProblem(problem);
    if (state === now_) return;
    state = now_;
    by("live").dataset.state = state;
    by("live").replaceChildren(
      make("span", { class: "shape", "aria-hidden": "true", text: state === "live" ? "●" : "○" }),
      state === "live" ? "Live" : `Not live since ${clock(now())}: trying again`,
    );
    by("live").title = problem ? `${problem.message}. ${problem.remedy || ""}` : "";
  },
  take() {
    refresher.ask();
  },
});

// in and out

function leave(problem) {
  api.forget();
  live.stop();
  refresher.reset();
  dashboard = shown = null;
  state = "";
  statuses = new Map();
  views = new Map();
  updates.length = 0;
  quiet();
  place.replaceChildren();
  by("views").replaceChildren();
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
  for (const id of ["views", "me", "live", "sign-out", "dashboard"]) setHidden(by(id), true);
  by("live").replaceChildren();
  by("me").replaceChildren();
  document.title = "Sign in · sublet studio";
  by("sign-in-problem").replaceChildren(...(problem ? problemParts(problem) : []));
  setHidden(by("connecting"), true);
  setHidden(by("sign-in"), false);
  by("token").value = "";
  by("token").focus();
}

by("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = by("token").value.trim();
  const problem = by("sign-in-problem");
  problem.replaceChildren();
  if (!/^sublet_[\x21-\x7e]+$/.test(token)) {
    problem.replaceChildren(
      ...problemParts({
        message: "That is not a token",
        remedy: "paste the whole line that 'sublet tenant token add' printed; it begins with sublet_",
      }),
    );
    by("token").focus();
    return;
  }
  api.signIn(token);
  try {
    await api.get("v1/me");
    by("token").value = "";
    enter();
  } catch (error) {
    if (error.status !== 401) {
      api.forget();
      problem.replaceChildren(...problemParts(error));
    }
  }
});

async function enter() {
  const problem = await refresher.fetch();
  if (!api.signedIn()) return;
  by("connecting").replaceChildren(
    ...(dashboard ? [] : problemParts(problem || { message: "the studio does not answer" })),
  );
  setHidden(by("connecting"), Boolean(dashboard));
  if (dashboard) {
    setHidden(by("sign-in"), true);
    views.get(shown).title.focus({ preventScroll: true });
  } else setTimeout(enter, 2000);
}

by("sign-out").addEventListener("click", () => {
  leave();
  say("Signed out. This tab has forgotten the token.");
});
api.whenRefused((problem) => leave(problem));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names a view
  by("main").focus();
});
addEventListener("hashchange", () => go());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresher.ask();
});
setInterval(() => {
  if (dashboard && !document.hidden) refresher.ask();
}, ANYWAY_MS);
ticks.every(() => {
  if (!dashboard || now() < soonest + 0.5) return;
  soonest = Infinity;
  refresher.ask();
});
ticks.start();

if (api.signedIn()) enter();
else leave();
