/* The service's dashboard as the views want it.
 *
 * Rules of this file: a part that is missing is an empty one, so that a view never asks whether it is there.
 */

const PARTS = [
  "devices",
  "leases",
  "sessions",
  "waitlist",
  "timeline",
  "tenants",
  "jobs",
  "queues",
  "quarantine",
  "receipts",
];

export function readDashboard(dashboard) {
  const parts = PARTS.map((name) => [name, Array.isArray(dashboard[name]) ? dashboard[name] : []]);
  return { at: dashboard.at, id: dashboard.id, me: dashboard.me || {}, ...Object.fromEntries(parts) };
}
