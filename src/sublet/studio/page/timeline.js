/* The last hour: every lease as a bar on its device's line.
 *
 * Rules of this file:
 * - A bar stands at its instants, in seconds. Time passes by moving the window (the viewBox), so a tick touches one attribute of each device
 *   and no bar; a live lease's bar ends in the future and is cut at the right edge, which is now.
 * - One stop for the keyboard: arrows go from bar to bar. What a bar means is said in words, when it is pointed at or has the focus, and stands
 *   in a table below for whoever wants it so.
 */

import { draw, keyed, make, setFact, setText } from "./making.js";
import { Table } from "./tables.js";
import { clock, now, short, size, span, text } from "./words.js";
import { every } from "./ticks.js";

const HOUR = 3600;
const ZOOMS = [
  [HOUR, ["1 h ago", "45 m", "30 m", "15 m", "now"]],
  [600, ["10 m ago", "7:30", "5:00", "2:30", "now"]],
];
const LANE = 14;
const FUTURE = 30 * 24 * HOUR;
const MOST_LANES = 12;

export class Timeline {
  constructor(whose) {
    this.base = Math.floor(now());
    this.bars = new Map();
    this.current = "";
    this.list = make("div", {
      class: "timeline",
      role: "listbox",
      "aria-label": "Leases of the last hour, by device. Arrow keys go from one to the next.",
    });
    this.axis = make("div", { class: "axis", "aria-hidden": "true" });
    this.zoom = make("button", { type: "button", class: "quiet more" });
    this.zoom.addEventListener("click", () => {
      this.look(this.window === HOUR ? ZOOMS[1] : ZOOMS[0]);
      this.show(this.rows, this.devices);
    });
    this.look(ZOOMS[0]);
    this.tip = make("div", { class: "tip", role: "tooltip", id: "timeline-tip", hidden: true });
    this.empty = make("p", {
      class: "empty",
      text: `No lease${whose} in the last hour. Open a session, and it is drawn here from its grant to its end.`,
    });
    this.table = new Table({
      caption: "Leases of the last hour",
      keyOf: (row) => row.key,
      empty: ["No lease in the last hour."],
      columns: [
        { name: "Lease", value: (row) => row.lease_id },
        { name: "Tenant", value: (row) => row.tenant },
        { name: "Device", value: (row) => row.device },
        { name: "From", value: (row) => clock(row.from), kind: "number" },
        { name: "To", value: (row) => (row.to ? clock(row.to) : "still live"), kind: "number" },
        { name: "Tier", value: (row) => row.tier },
        { name: "State", value: (row) => text(row.state) },
        { name: "Reason", value: (row) => why(row) || "-", kind: "long" },
      ],
    });
    this.details = make("details", {}, make("summary", { text: "The same as a table" }), this.table.node);
    this.legend = make(
      "p",
      { class: "legend" },
      ...[
        ["interactive", "interactive"],
        ["batch", "batch"],
        ["spot", "spot"],
        ["taken", "taken back before its holder was done"],
      ].map(([name, words]) =>
        make("span", {}, make("i", { class: `swatch ${name}`, "aria-hidden": "true" }), words),
      ),
    );
    this.node = make(
      "div",
      {},
      this.empty,
      this.list,
      this.axis,
      this.legend,
      this.zoom,
      this.details,
      this.tip,
    );
    this.details.addEventListener("toggle", () => this.tabulate());
    this.listen();
    every(() => this.tick());
  }

  /** How far back is seen. */
  look([seconds, labels]) {
    this.window = seconds;
    this.axis.replaceChildren(...labels.map((words) => make("span", { text: words })));
    setText(this.zoom, seconds === HOUR ? "Show the last 10 minutes only" : "Show the whole hour");
  }

  show(rows, devices) {
    this.devices = devices;
    this.rows = rows.map((row) => ({ ...row, key: `${row.lease_id} ${row.device}` }));
    this.bars = new Map(this.rows.map((row) => [row.key, row]));
    const by = new Map(devices.map(({ id }) => [id, []]));
    for (const row of this.rows) {
      if (!by.has(row.device)) by.set(row.device, []);
      by.get(row.device).push(row);
    }
    const tallest = by.size > 6 ? 30 : 60;
    const lines = [...by].map(([device, found]) => ({ device, tallest, ...laned(found, this.window / 100) }));
    this.empty.hidden = this.rows.length > 0;
    this.list.hidden =
      this.axis.hidden =
      this.legend.hidden =
      this.zoom.hidden =
      this.details.hidden =
        !this.rows.length;
    if (!this.bars.has(this.current))
      this.current = this.rows.length ? this.rows[this.rows.length - 1].key : "";
    keyed(
      this.list,
      lines,
      (line) => line.device,
      (line) => this.line(line),
      (node, line) => this.change(node, line),
    );
    this.tick(true);
    this.tabulate();
    if (this.shown) {
      const row = this.bars.get(this.shown);
      if (row) this.words(row);
      else this.hide();
    }
  }

  line({ device }) {
    const picture = draw("svg", { preserveAspectRatio: "none", role: "presentation" });
    const node = make(
      "div",
      { class: "line", role: "group", "aria-label": `on ${device}` },
      make("span", { class: "device", "aria-hidden": "true", text: device, title: device }),
      picture,
    );
    node.picture = picture;
    return node;
  }

  change(node, { rows, lanes, tallest }) {
    const height = lanes * LANE;
    if (node.lanes !== lanes) {
      node.lanes = lanes;
      node.picture.style.height = `${Math.max(14, Math.min(tallest, height))}px`;
    }
    keyed(
      node.picture,
      rows,
      (row) => row.key,
      (row) => {
        const bar = draw("rect", {
          role: "option",
          "aria-selected": "false",
          tabindex: "-1",
          height: LANE - 2,
          "vector-effect": "non-scaling-stroke",
        });
        bar.dataset.key = row.key;
        return bar;
      },
      (bar, row) => {
        const from = row.from - this.base;
        const to = row.to ? row.to - this.base : FUTURE + now() - this.base;
        const drawn = [row.from, row.to, row.lane, row.state, row.reason, row.detail, this.window].join();
        if (bar.drawn !== drawn) {
          bar.drawn = drawn;
          setFact(bar, "x", from.toFixed(2));
          setFact(bar, "width", Math.max(this.window / 300, to - from).toFixed(2));
          setFact(bar, "y", row.lane * LANE + 1);
          setFact(bar, "class", ["bar", row.tier, row.state, taken(row) ? "taken" : ""].join(" ").trim());
          setFact(bar, "aria-label", sentence(row));
        }
        setFact(bar, "tabindex", row.key === this.current ? "0" : "-1");
      },
    );
  }

  /** The window moves on; everything in it stays where it is. */
  tick(anyway = false) {
    if (!anyway && !this.node.isConnected) return false;
    if (!anyway && !this.node.checkVisibility()) return true;
    const left = Math.floor(now()) - this.window - this.base;
    for (const node of this.list.children) {
      const box = `${left} 0 ${this.window} ${node.lanes * LANE}`;
      if (node.box === box) continue;
      node.box = box;
      node.picture.setAttribute("viewBox", box);
    }
    return true;
  }

  tabulate() {
    if (this.details.open) this.table.show([...this.rows].sort((a, b) => b.from - a.from));
  }

  listen() {
    const barOf = (event) => event.target.closest("rect.bar");
    this.list.addEventListener("pointerover", (event) => {
      const bar = barOf(event);
      if (bar) this.point(bar);
      else this.hide();
    });
    this.list.addEventListener("pointerleave", () => this.hide());
    this.list.addEventListener("focusin", (event) => {
      const bar = barOf(event);
      if (bar) {
        this.choose(bar);
        this.point(bar);
      }
    });
    this.list.addEventListener("focusout", () => this.hide());
    this.list.addEventListener("keydown", (event) => {
      const bars = [...this.list.querySelectorAll("rect.bar")];
      const at = bars.findIndex((bar) => bar.dataset.key === this.current);
      const to = {
        ArrowRight: at + 1,
        ArrowLeft: at - 1,
        ArrowDown: at + 1,
        ArrowUp: at - 1,
        Home: 0,
        End: bars.length - 1,
      }[event.key];
      if (event.key === "Escape") this.hide();
      if (to === undefined || !bars.length) return;
      event.preventDefault();
      bars[Math.max(0, Math.min(bars.length - 1, to))].focus();
    });
  }

  choose(bar) {
    for (const before of this.list.querySelectorAll('[aria-selected="true"], [tabindex="0"]')) {
      before.setAttribute("aria-selected", "false");
      before.setAttribute("tabindex", "-1");
    }
    this.current = bar.dataset.key;
    bar.setAttribute("aria-selected", "true");
    bar.setAttribute("tabindex", "0");
  }

  point(bar) {
    const row = this.bars.get(bar.dataset.key);
    if (!row) return;
    this.words(row);
    this.shown = row.key;
    this.tip.hidden = false;
    const box = bar.getBoundingClientRect();
    const line = bar.closest("svg").getBoundingClientRect();
    const own = this.tip.getBoundingClientRect();
    const middle = (Math.max(box.left, line.left) + Math.min(box.right, line.right)) / 2;
    this.tip.style.left = `${Math.max(8, Math.min(document.documentElement.clientWidth - own.width - 8, middle - own.width / 2))}px`;
    const above = box.top - own.height - 6;
    this.tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
  }

  words(row) {
    setText(this.tip, sentence(row));
  }

  hide() {
    this.shown = "";
    this.tip.hidden = true;
  }
}

const taken = (row) => Boolean(row.to) && !["", "released", "idle", undefined, null].includes(row.reason);

const why = (row) => [row.reason, row.detail].filter(Boolean).join(": ");

function sentence(row) {
  const until = row.to ? `to ${clock(row.to)} (${span(row.to - row.from)})` : "and is still live";
  return `${row.tenant}, ${row.tier}${row.vram_bytes ? `, ${size(row.vram_bytes)}` : ""}, lease ${short(row.lease_id)} on ${row.device}: from ${clock(row.from)} ${until}. ${why(row) || row.state || ""}`.trim();
}

/** Bars that overlap stand in lanes; the first lane that is free takes one. A short one has its lane for itself for `least` seconds, so that
 * it can be seen and pointed at. */
export function laned(rows, least) {
  const ends = [];
  const placed = [...rows]
    .sort((a, b) => a.from - b.from || (a.key < b.key ? -1 : 1))
    .map((row) => {
      let lane = ends.findIndex((end) => end <= row.from);
      if (lane < 0) lane = ends.length < MOST_LANES ? ends.length : ends.indexOf(Math.min(...ends));
      ends[lane] = Math.max(ends[lane] || 0, row.to ? Math.max(row.to, row.from + least) : Infinity);
      return { ...row, lane };
    });
  return { rows: placed, lanes: Math.max(1, ends.length) };
}
