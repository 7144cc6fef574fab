/* Who used what, what it costs, and who is in the way of others. */

import * as acts from "./acts.js";
import { get, open } from "./api.js";
import { make } from "./making.js";
import { marked, meter, section } from "./parts.js";
import { problemParts, sayProblem } from "./said.js";
import { buttons, Table } from "./tables.js";
import { count, money, percent, size, text, took } from "./words.js";

const BY = [
  ["tenant", "tenant"],
  ["session", "session"],
  ["tier", "tier"],
  ["day", "day"],
  ["job", "job"],
];
const SUMS_MS = 10_000; // sums over days are dearer than a dashboard
const DAYS = [
  ["1", "1 day"],
  ["7", "7 days"],
  ["30", "30 days"],
];

export class UsageView {
  constructor({ operator }) {
    this.title = make("h1", { tabindex: "-1", text: operator ? "Usage of every tenant" : "Your usage" });
    this.tenants = new Table({
      caption: "Tenants: what they hold, used and may use",
      keyOf: (t) => t.name,
      empty: ["Nobody has used anything yet. The first lease writes the first line."],
      act: (what, tenant) => acts.quota(tenant),
      columns: [
        { name: "Tenant", value: (t) => t.name },
        { name: "Live", value: (t) => count(t.live), kind: "number" },
        { name: "Waiting", value: (t) => count(t.waiting), kind: "number" },
        { name: "GPU time", value: (t) => took(t.gpu_seconds ?? NaN), kind: "number" },
        { name: "Cost", value: (t) => money(t.cost), kind: "number" },
        { name: "Weight", value: (t) => count(t.weight), kind: "number" },
        { name: "Quotas", value: (t) => limits(t.quotas), kind: "long" },
        ...(operator
          ? [
              {
                name: "Actions",
                value: (t) => t.name,
                kind: "actions",
                draw: (cell, t) =>
                  buttons(cell, [{ act: "quota", text: "Set quotas", label: `Set quotas of ${t.name}` }]),
              },
            ]
          : []),
      ],
    });
    this.noisy = new Table({
      caption:
        "Tenants beside each other in the last 7 days: who had more than their share while others waited",
      keyOf: (row) => row.tenant,
      empty: [
        "Nobody to compare yet. When two tenants want one device, it is seen here who waited for whom.",
      ],
      columns: [
        { name: "Tenant", value: (row) => row.tenant },
        marked("Verdict", (row) => (row.noisy ? "noisy" : "fine")),
        {
          name: "Held",
          value: (row) => percent(row.held_share),
          draw: (cell, row) => meter(cell, row.held_share),
          kind: "number",
        },
        { name: "Fair share", value: (row) => percent(row.fair_share), kind: "number" },
        { name: "Made others wait", value: (row) => took(row.caused_wait_seconds), kind: "number" },
        { name: "Waited", value: (row) => took(row.waited_seconds), kind: "number" },
        { name: "Calls", value: (row) => count(row.calls), kind: "number" },
        { name: "Errors", value: (row) => count(row.errors), kind: "number" },
        { name: "Why", value: (row) => text(row.reason), kind: "long" },
      ],
    });
    this.by = choice("usage-by", "Sum by", BY, "tenant");
    this.days = choice("usage-days", "Over", DAYS, "7");
    this.csv = make("button", { type: "button", text: "Save as CSV" });
    this.csv.addEventListener("click", () => this.save());
    for (const { select } of [this.by, this.days]) select.addEventListener("change", () => this.fetch());
    this.sums = make("div", { "aria-live": "off" });
    this.node = make(
      "div",
      {},
      this.title,
      section("tenants", operator ? "Tenants" : "You", this.tenants.node),
      ...(operator ? [section("noisy", "Noisy neighbours", this.noisy.node)] : []),
      section(
        "sums",
        "Usage and cost",
        make("p", { class: "actions start" }, this.by.node, this.days.node, this.csv),
        this.sums,
      ),
    );
    this.operator = operator;
    this.at = -Infinity;
  }

  show(dashboard) {
    this.tenants.show(dashboard.tenants);
    if (performance.now() - this.at > SUMS_MS) this.fetch();
  }

  async fetch() {
    this.at = performance.now();
    const { by, days } = this;
    try {
      const [{ rows }, { neighbours }] = await Promise.all([
        get(`v1/usage?days=${days.select.value}&by=${by.select.value}`),
        this.operator ? get("v1/neighbours") : { neighbours: [] },
      ]);
      this.fill(rows, by.select.value);
      this.noisy.show(neighbours);
    } catch (problem) {
      this.sums.replaceChildren(make("p", { class: "problem" }, ...problemParts(problem)));
      this.sum = null;
    }
  }

  fill(rows, by) {
    if (!this.sum || this.sum.by !== by) {
      this.sum = new Table({
        caption: `Usage by ${by}`,
        keyOf: (row) => row.key,
        empty: ["Nothing was used in this time. Choose a longer one above."],
        columns: [
          { name: by.charAt(0).toUpperCase() + by.slice(1), value: (row) => row.key },
          { name: "GPU time", value: (row) => took(row.gpu_seconds ?? NaN), kind: "number" },
          {
            name: "VRAM × time (GB·s)",
            value: (row) => (Number.isFinite(row.vram_gb_seconds) ? row.vram_gb_seconds.toFixed(1) : "-"),
            kind: "number",
          },
          { name: "Waited", value: (row) => took(row.wait_seconds ?? NaN), kind: "number" },
          { name: "Cost", value: (row) => money(row.cost), kind: "number" },
        ],
      });
      this.sum.by = by;
      this.sums.replaceChildren(this.sum.node);
    }
    this.sum.show(rows);
  }

  async save() {
    try {
      const answer = await open(
        "GET",
        `v1/usage?days=${this.days.select.value}&by=${this.by.select.value}&format=csv`,
      );
      const link = make("a", { download: `usage-by-${this.by.select.value}.csv` });
      link.href = URL.createObjectURL(await answer.blob());
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    } catch (problem) {
      sayProblem(problem);
    }
  }
}

function limits(quotas) {
  const said = acts.QUOTAS.filter(({ name }) => name !== "weight" && quotas[name]).map(
    ({ name, label, kind }) =>
      `${label.toLowerCase()} ${kind === "size" ? size(quotas[name]) : kind === "time" ? took(quotas[name]) : quotas[name]}`
        .replace("vram", "VRAM")
        .replace("gpu", "GPU"),
  );
  return said.join(" · ") || "no limit";
}

function choice(id, label, options, value) {
  const select = make(
    "select",
    { id },
    ...options.map(([key, words]) => make("option", { value: key, text: words, selected: key === value })),
  );
  return { select, node: make("span", { class: "choice" }, make("label", { for: id, text: label }), select) };
}
