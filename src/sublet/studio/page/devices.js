/* Devices: how much of each is taken, by whom, and what is withheld. Rules of this file: a bar is a picture; the words beside it say the same. */

import { keyed, make, setFact, setHidden, setText } from "./making.js";
import { kindOf, mark } from "./marks.js";
import { buttons } from "./tables.js";
import { size, some, text } from "./words.js";

const MOST_NAMES = 4;

export class Devices {
  constructor({ act }) {
    this.list = make("ul", { class: "devices" });
    this.empty = make(
      "p",
      { class: "empty" },
      "No device yet. An operator names them in ",
      make("code", { text: "SUBLET_DEVICES" }),
      ", for example ",
      make("code", { text: "host:2x16GiB" }),
      ", and starts the service again.",
    );
    this.node = make("div", {}, this.list, this.empty);
    this.list.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-act]");
      if (button) act(button.dataset.act, this.rows.get(button.closest("li").dataset.key), button);
    });
  }

  show(devices, operator) {
    this.rows = new Map(devices.map((device) => [device.id, device]));
    setHidden(this.empty, devices.length > 0);
    keyed(
      this.list,
      devices,
      (device) => device.id,
      (device) => this.made(device),
      (node, device) => this.change(node, device, operator),
    );
  }

  made(device) {
    const parts = {
      state: make("span", {}),
      room: make("span", { class: "room" }),
      kind: make("span", { class: "kind" }),
      bar: make("div", { class: "vram", role: "img" }),
      who: make("p", { class: "on" }),
      note: make("p", { class: "note" }),
      does: make("div", { class: "does" }),
    };
    const node = make(
      "li",
      {},
      make(
        "div",
        { class: "line" },
        make("strong", { text: device.id }),
        parts.state,
        parts.kind,
        parts.room,
      ),
      parts.bar,
      make("div", { class: "line" }, parts.who, parts.does),
      parts.note,
    );
    node.dataset.key = device.id;
    node.parts = parts;
    return node;
  }

  change(node, device, operator) {
    const { parts } = node;
    if (node.state !== device.state) {
      node.state = device.state;
      mark(parts.state, device.state);
      node.classList.toggle("withheld", kindOf(device.state) !== "good");
    }
    setText(
      parts.kind,
      [device.class, device.host].filter((words) => words && words !== device.id).join(" · "),
    );
    const taken = device.capacity_bytes - device.free_bytes;
    setText(parts.room, `${size(device.free_bytes)} free of ${size(device.capacity_bytes)}`);
    const known = device.leases.reduce((sum, lease) => sum + lease.vram_bytes, 0);
    const segments = [...device.leases];
    if (taken > known) segments.push({ id: "others", tenant: "", tier: "others", vram_bytes: taken - known });
    setFact(parts.bar, "aria-label", `${size(taken)} of ${size(device.capacity_bytes)} taken`);
    keyed(
      parts.bar,
      segments,
      (lease) => lease.id,
      () => make("span", {}),
      (segment, lease) => {
        const width = `${((100 * lease.vram_bytes) / (device.capacity_bytes || 1)).toFixed(3)}%`;
        if (segment.taken !== width) {
          segment.taken = width;
          segment.style.width = width;
        }
        setFact(segment, "class", ["slice", lease.tier, lease.state].filter(Boolean).join(" "));
        const words = lease.tenant
          ? `${lease.tenant}: ${size(lease.vram_bytes)}, ${lease.tier}`
          : `others: ${size(lease.vram_bytes)}`;
        if (segment.title !== words) segment.title = words;
      },
    );
    setText(parts.who, who(segments));
    setText(parts.note, device.note ? `Why: ${device.note}` : "");
    setHidden(parts.note, !device.note);
    const able = !operator
      ? []
      : device.state === "ready"
        ? [
            { act: "drain", text: "Drain", label: `Drain ${device.id}` },
            { act: "quarantine", text: "Quarantine", label: `Quarantine ${device.id}` },
          ]
        : device.state === "lost" || device.state === "taken"
          ? []
          : [{ act: "clear", text: "Clear", label: `Clear ${device.id}` }];
    buttons(parts.does, able);
  }
}

function who(segments) {
  const by = new Map();
  for (const { tenant, vram_bytes: bytes } of segments)
    by.set(tenant || "others", (by.get(tenant || "others") || 0) + bytes);
  const names = [...by].sort((a, b) => b[1] - a[1]);
  if (!names.length) return "Nobody is on it";
  const shown = names.slice(0, MOST_NAMES).map(([name, bytes]) => `${text(name)} ${size(bytes)}`);
  if (names.length > MOST_NAMES)
    shown.push(`and ${some(names.length - MOST_NAMES, "more")}`.replace("mores", "more"));
  return shown.join(" · ");
}
