/* The studio at one look: what there is, who is on it, what is yours, who waits. */

import * as acts from "./acts.js";
import { can, waits } from "./console.js";
import { Devices } from "./devices.js";
import { keyed, make, setHidden, setText } from "./making.js";
import { code, HOLDS, marked, revocable, section, titled } from "./parts.js";
import { buttons, Table } from "./tables.js";
import { countdown } from "./ticks.js";
import { Timeline } from "./timeline.js";
import { clock, count, money, percent, price, size, span, text, took } from "./words.js";

export class StudioView {
  constructor({ operator }) {
    this.title = make("h1", { tabindex: "-1", class: "unseen", text: "Studio" });
    this.tiles = make("dl", { class: "tiles" });
    this.offers = make("ul", { class: "offers" });
    this.offered = section("offered", "Offers", this.offers);
    this.offers.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-act]");
      if (button) acts[button.dataset.act](this.byId.get(button.closest("li").dataset.key));
    });
    this.devices = new Devices({ act: (what, device) => acts.device(what, device) });
    this.timeline = new Timeline(operator ? "" : " of yours");
    const begin = make("button", { type: "button", class: "main", text: "Open a session" });
    begin.addEventListener("click", () => acts.openSession());
    this.sessions = new Table({
      caption: operator ? "Open sessions of every tenant" : "Your open sessions",
      most: 12,
      keyOf: (session) => session.id,
      empty: [
        "No session is open. ",
        make("strong", { text: "Open a session" }),
        " to get a GPU here, or from Python: ",
        code('sublet.connect(url, token).session(vram="1GiB")'),
        ".",
      ],
      act: (what, session) =>
        what === "revoke"
          ? acts.revoke({
              id: session.lease_id,
              tenant: session.tenant,
              vram_bytes: session.granted_bytes,
              devices: session.devices,
              name: session.name,
            })
          : acts[what](session),
      columns: [
        {
          name: "Session",
          value: (s) => acts.nameOf(s),
          draw: (cell, s) =>
            cell.replaceChildren(
              make("a", { href: `#session/${encodeURIComponent(s.id)}`, title: s.id, text: acts.nameOf(s) }),
            ),
        },
        ...(operator ? [{ name: "Tenant", value: (s) => s.tenant }] : []),
        marked("Status", (s) => s.status),
        {
          name: "Left",
          value: () => "-",
          until: (s) => (HOLDS.includes(s.status) ? s.expires_at : 0),
          kind: "number",
        },
        { name: "VRAM", value: (s) => size(s.granted_bytes || s.vram_bytes), kind: "number" },
        { name: "Tier", value: (s) => s.tier },
        { name: "Device", value: (s) => text((s.devices || []).join(", ")) },
        { name: "Now", value: (s) => doing(s), kind: "long" },
        { name: "Cost", value: (s) => money(s.usage?.cost), kind: "number" },
        {
          name: "Actions",
          value: (s) => `${s.status} ${acts.nameOf(s)} ${s.tenant}`,
          kind: "actions",
          draw: (cell, s) =>
            buttons(cell, [
              ...can(s, this.me),
              ...revocable(operator, HOLDS.includes(s.status) && s.status !== "revoking", acts.nameOf(s)),
            ]),
        },
      ],
    });
    this.waitlist = new Table({
      caption: operator
        ? "Who waits for a GPU, first served first"
        : "What you wait for, with its place among everybody's",
      most: 10,
      keyOf: (row) => row.lease_id,
      empty: [
        operator
          ? "Nobody waits: what is asked for now is given at once, if it fits."
          : "Nothing of yours waits. What does not fit at once stands here, with its place and why.",
      ],
      columns: [
        { name: "Place", value: (row) => count(row.position), kind: "number" },
        { name: "Tenant", value: (row) => row.tenant },
        { name: "VRAM", value: (row) => size(row.vram_bytes), kind: "number" },
        { name: "Tier", value: (row) => row.tier },
        { name: "Since", value: (row) => clock(row.joined_at), kind: "number" },
        { name: "About", value: (row) => span(row.eta_seconds ?? NaN), kind: "number" },
        { name: "Why", value: (row) => text(row.reason), kind: "long" },
      ],
    });
    this.node = make(
      "div",
      { class: "studio" },
      this.title,
      this.tiles,
      this.offered,
      titled("sessions", "Sessions", [begin], this.sessions.node),
      make(
        "div",
        { class: "halves" },
        section("devices", "Devices", this.devices.node),
        make(
          "div",
          {},
          section("timeline", "The last hour", this.timeline.node),
          section("waitlist", "Waitlist", this.waitlist.node),
        ),
      ),
    );
    this.operator = operator;
  }

  show(dashboard) {
    this.me = dashboard.me;
    this.byId = new Map(dashboard.sessions.map((session) => [session.id, session]));
    tiles(this.tiles, summary(dashboard, this.operator));
    const offered = dashboard.sessions.filter(
      (s) => s.offer && s.status === "offered" && s.tenant === dashboard.me.tenant,
    );
    setHidden(this.offered, offered.length === 0);
    keyed(
      this.offers,
      offered,
      (s) => s.id,
      (s) => this.offer(s),
      (node, s) => changeOffer(node, s),
    );
    this.devices.show(dashboard.devices, this.operator);
    this.timeline.show(dashboard.timeline, dashboard.devices);
    this.sessions.show(pressing(dashboard.sessions, dashboard.me));
    this.waitlist.show(dashboard.waitlist);
  }

  offer(session) {
    const parts = {
      words: make("p", {}),
      left: make("strong", { class: "number" }),
      does: make("p", { class: "actions" }),
    };
    const node = make("li", {}, parts.words, make("p", {}, "Answer within ", parts.left), parts.does);
    node.dataset.key = session.id;
    node.parts = parts;
    return node;
  }
}

function changeOffer(node, session) {
  const { parts } = node;
  const { offer } = session;
  const more = [
    offer.price_per_hour ? `${price(offer.price_per_hour)} per GPU-hour` : "",
    Number.isFinite(offer.preemption_odds) ? `odds of being preempted ${percent(offer.preemption_odds)}` : "",
  ].filter(Boolean);
  setText(
    parts.words,
    `${acts.nameOf(session)} asked for ${size(session.vram_bytes)} and may have ${size(offer.vram_bytes)} now${more.length ? ` (${more.join(", ")})` : ""}. ${offer.sentence || ""}`,
  );
  countdown(parts.left, offer.until, "no time: it is over");
  buttons(parts.does, [
    {
      act: "accept",
      text: `Accept ${size(offer.vram_bytes)}`,
      class: "main",
      label: `Accept ${size(offer.vram_bytes)} for ${acts.nameOf(session)}`,
    },
    {
      act: "decline",
      text: "Decline and wait",
      label: `Decline and wait: the offer for ${acts.nameOf(session)}`,
    },
  ]);
}

const URGENT = ["offered", "revoking", "suspended", "waiting", "opening", "active", "ended"];

/** What somebody may have to answer first, one's own before others', and then as they were opened. */
function pressing(sessions, me) {
  const rank = (session) =>
    URGENT.indexOf(session.status) + (session.tenant === me.tenant ? 0 : URGENT.length);
  return [...sessions].sort((a, b) => rank(a) - rank(b) || a.opened_at - b.opened_at);
}

function doing(session) {
  if (session.status === "offered" && session.offer) return acts.offerWords(session.offer);
  if (session.wait && session.status !== "active") return waits(session.wait);
  return [session.reason, session.detail].filter(Boolean).join(": ") || "-";
}

function tiles(list, wanted) {
  keyed(
    list,
    wanted,
    ({ name }) => name,
    ({ name }) => make("div", {}, make("dt", { text: name }), make("dd", {}), make("dd", { class: "hint" })),
    (node, { value, more = "" }) => {
      setText(node.children[1], value);
      setText(node.children[2], more);
    },
  );
}

function summary(dashboard, operator) {
  const usable = dashboard.devices.filter((device) => device.state === "ready");
  const free = usable.reduce((sum, device) => sum + device.free_bytes, 0);
  const whole = dashboard.devices.reduce((sum, device) => sum + device.capacity_bytes, 0);
  const states = (name) => dashboard.sessions.filter((session) => session.status === name).length;
  const own = dashboard.tenants.find((tenant) => tenant.name === dashboard.me.tenant);
  const sum = operator
    ? dashboard.tenants.reduce((total, tenant) => total + (tenant.gpu_seconds || 0), 0)
    : own?.gpu_seconds;
  const out = dashboard.devices.length - usable.length;
  return [
    { name: "Free VRAM", value: size(free), more: `of ${size(whole)}` },
    {
      name: "Live leases",
      value: count(dashboard.leases.filter((lease) => HOLDS.includes(lease.state)).length),
      more: operator ? "of all tenants" : "yours",
    },
    { name: "Active sessions", value: count(states("active")), more: `of ${dashboard.sessions.length} open` },
    {
      name: "Waiting",
      value: count(dashboard.waitlist.length),
      more: states("offered")
        ? `${states("offered")} with an offer`
        : operator
          ? "in the waitlist"
          : "of yours",
    },
    {
      name: "Devices ready",
      value: `${usable.length} of ${dashboard.devices.length}`,
      more: out ? `${out} withheld` : "none withheld",
    },
    {
      name: "GPU time",
      value: took(sum ?? NaN),
      more: operator ? "all tenants" : `cost ${money(own?.cost)}`,
    },
  ];
}
