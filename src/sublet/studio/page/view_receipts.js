/* The proof that nothing was left of a lease, and what is withheld because there is none. */

import * as acts from "./acts.js";
import { make } from "./making.js";
import { marked, section } from "./parts.js";
import { buttons, Table } from "./tables.js";
import { clock, short, size, text, took } from "./words.js";

export class ReceiptsView {
  constructor({ operator }) {
    this.title = make("h1", { tabindex: "-1", text: operator ? "Receipts and quarantine" : "Receipts" });
    this.withheld = new Table({
      caption: "Devices that are withheld",
      keyOf: (device) => device.id,
      empty: ["No device is withheld."],
      act: (what, device) => acts.device(what, device),
      columns: [
        { name: "Device", value: (d) => d.id },
        marked("State", (d) => d.state),
        { name: "VRAM", value: (d) => size(d.capacity_bytes), kind: "number" },
        { name: "Why", value: (d) => text(d.note), kind: "long" },
        ...(operator
          ? [
              {
                name: "Actions",
                value: (d) => d.state,
                kind: "actions",
                draw: (cell, d) => buttons(cell, [{ act: "clear", text: "Clear", label: `Clear ${d.id}` }]),
              },
            ]
          : []),
      ],
    });
    this.receipts = new Table({
      caption: "Receipts: how each ended lease was torn down, newest first",
      most: 50,
      keyOf: (r) => `${r.lease_id} ${r.settled_at}`,
      empty: [
        "No Receipt yet. When a lease that held a device ends, what was freed, how and how long it took stands here.",
      ],
      columns: [
        {
          name: "Lease",
          value: (r) => short(r.lease_id),
          draw: (cell, r) =>
            cell.replaceChildren(make("span", { title: r.lease_id, text: short(r.lease_id) })),
        },
        { name: "Tenant", value: (r) => text(r.tenant) },
        marked("Proof", (r) => (r.proven ? "proven" : "not proven")),
        {
          name: "How",
          value: (r) => [HOW[r.ladder] || text(r.ladder), r.containment].filter(Boolean).join(", "),
          kind: "long",
        },
        { name: "Freed", value: (r) => size(r.freed_bytes), kind: "number" },
        { name: "Scrubbed", value: (r) => size(r.scrubbed_bytes), kind: "number" },
        { name: "Took", value: (r) => took(r.duration_seconds), kind: "number" },
        { name: "Device", value: (r) => text(r.devices.join(", ")) },
        { name: "When", value: (r) => clock(r.settled_at), kind: "number" },
        { name: "Detail", value: (r) => text(r.detail), kind: "long" },
      ],
    });
    this.node = make(
      "div",
      {},
      this.title,
      ...(operator ? [section("withheld", "Quarantine", this.withheld.node)] : []),
      section("receipts", "Receipts", this.receipts.node),
    );
  }

  show(dashboard) {
    this.withheld.show(dashboard.quarantine);
    this.receipts.show(dashboard.receipts);
  }
}

const HOW = {
  gone: "had left by itself",
  term: "was asked to leave",
  kill: "was killed",
  unproven: "could not be proven",
  unseen: "nobody could look",
};
