/* Every live lease, whatever holds it. */

import * as acts from "./acts.js";
import { make, setText } from "./making.js";
import { code, HOLDS, marked, revocable } from "./parts.js";
import { buttons, Table } from "./tables.js";
import { clock, short, size, text } from "./words.js";

export class LeasesView {
  constructor({ operator }) {
    this.title = make("h1", { tabindex: "-1", text: operator ? "Live leases" : "Your live leases" });
    this.table = new Table({
      caption: "Leases that hold a device or wait for one",
      tall: operator ? "leases and-acts" : "leases",
      keyOf: (lease) => lease.id,
      empty: [
        "No lease is live. A session, a script with ",
        code("sublet.gpu()"),
        " or ",
        code("sublet run"),
        " takes one.",
      ],
      act: (what, lease) => acts.revoke(lease),
      columns: [
        {
          name: "Lease",
          value: (l) => short(l.id),
          draw: (cell, l) => cell.replaceChildren(make("span", { title: l.id, text: short(l.id) })),
        },
        { name: "Tenant", value: (l) => l.tenant },
        marked("State", (l) => l.state),
        {
          name: "Left",
          value: () => "-",
          until: (l) => (HOLDS.includes(l.state) ? l.ends_at : 0),
          kind: "number",
        },
        { name: "VRAM", value: (l) => size(l.vram_bytes), kind: "number" },
        { name: "Tier", value: (l) => l.tier },
        { name: "Device", value: (l) => text(l.devices.join(", ")) },
        { name: "Since", value: (l) => clock(l.granted_at || l.joined_at), kind: "number" },
        { name: "Job", value: (l) => text(l.job), kind: "long" },
        { name: "Why", value: (l) => text(l.detail), kind: "long" },
        ...(operator
          ? [
              {
                name: "Actions",
                value: (l) => l.state,
                kind: "actions",
                draw: (cell, l) =>
                  buttons(cell, revocable(true, l.state === "active", `${l.tenant}, lease ${short(l.id)}`)),
              },
            ]
          : []),
      ],
    });
    this.wish = make("input", {
      id: "lease-wish",
      type: "text",
      autocomplete: "off",
      spellcheck: "false",
      "aria-describedby": "lease-count",
    });
    this.count = make("span", { id: "lease-count", class: "hint", role: "status" });
    this.wish.addEventListener("input", () => this.show(this.dashboard));
    this.node = make(
      "div",
      {},
      this.title,
      make(
        "section",
        { class: "card", "aria-label": "Leases" },
        make(
          "p",
          { class: "actions start filter" },
          make("label", { for: "lease-wish", text: "Only those with" }),
          this.wish,
          this.count,
        ),
        this.table.node,
      ),
    );
  }

  show(dashboard) {
    this.dashboard = dashboard;
    const words = this.wish.value.trim().toLowerCase().split(/\s+/);
    const found = dashboard.leases.filter((lease) => {
      const has =
        `${lease.id} ${lease.tenant} ${lease.state} ${lease.tier} ${lease.devices.join(" ")} ${lease.job} ${lease.detail}`.toLowerCase();
      return words.every((word) => has.includes(word));
    });
    setText(this.count, `${found.length} of ${dashboard.leases.length}`);
    this.table.show(found);
  }
}
