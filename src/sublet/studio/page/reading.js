/* The service's board as the views want it.
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

export function readBoard(board) {
  const parts = PARTS.map((name) => [name, Array.isArray(board[name]) ? board[name] : []]);
  return { at: board.at, id: board.id, me: board.me || {}, ...Object.fromEntries(parts) };
}
