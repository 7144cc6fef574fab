/* Jobs and queues: whether GPU time becomes progress. */

import { make } from "./making.js";
import { code, marked, meter, section } from "./parts.js";
import { Table } from "./tables.js";
import { clock, count, percent, text } from "./words.js";

export class WorkView {
  constructor() {
    this.title = make("h1", { tabindex: "-1", text: "Jobs and queues" });
    this.jobs = new Table({
      caption: "Jobs: how much of their GPU time became progress, and what was committed last",
      keyOf: (job) => `${job.tenant} ${job.job}`,
      empty: [
        "No job has run yet. ",
        code("sublet run"),
        " or ",
        code("sublet.train"),
        " starts one, and a session with a checkpoint is one too.",
      ],
      columns: [
        { name: "Job", value: (job) => job.job },
        { name: "Tenant", value: (job) => text(job.tenant) },
        {
          name: "Goodput",
          value: (job) => percent(job.goodput ?? NaN),
          draw: (cell, job) => meter(cell, job.goodput),
          kind: "number",
        },
        { name: "Step", value: (job) => text(job.step), kind: "number" },
        { name: "Version", value: (job) => text(job.version), kind: "number" },
        { name: "Last commit", value: (job) => clock(job.committed_at), kind: "number" },
      ],
    });
    this.queues = new Table({
      caption: "Queues: how many items are in which state",
      keyOf: (queue) => queue.name,
      empty: ["No queue yet. ", code("sublet queue publish"), " makes one."],
      columns: [
        { name: "Queue", value: (queue) => queue.name },
        marked("State", (queue) => (queue.paused ? "paused" : "live")),
        { name: "Ready", value: (queue) => count(queue.ready + queue.delayed), kind: "number" },
        { name: "Taken", value: (queue) => count(queue.leased), kind: "number" },
        { name: "Done", value: (queue) => count(queue.done), kind: "number" },
        { name: "Dead", value: (queue) => count(queue.dead), kind: "number" },
      ],
    });
    this.node = make(
      "div",
      {},
      this.title,
      section("jobs", "Jobs", this.jobs.node),
      section("queues", "Queues", this.queues.node),
    );
  }

  show(dashboard) {
    this.jobs.show(dashboard.jobs);
    this.queues.show(dashboard.queues);
  }
}
