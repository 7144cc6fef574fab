/* What can be done from the page: each act asks first, says what will happen, does it, and says what happened.
 *
 * Rules of this file: nothing is changed in the page before the service has changed it; the dashboard that follows shows it.
 */

import { Problem, send } from "./api.js";
import { ask } from "./dialogs.js";
import { say, sayProblem } from "./said.js";
import { parseSize, parseSpan, percent, price, short, size, some } from "./words.js";

const part = encodeURIComponent;
let refresh = () => {};

/** Who is told that something was changed. */
export function whenDone(act) {
  refresh = act;
}

async function does(act, words) {
  const answer = await act();
  say(typeof words === "function" ? words(answer) : words);
  refresh();
  return answer;
}

/** Without a question: what it does can be undone, or is what was asked for. */
async function atOnce(act, words) {
  try {
    return await does(act, words);
  } catch (problem) {
    sayProblem(problem);
    return undefined;
  }
}

export const nameOf = (session) => session.name || short(session.id);

// sessions

export function openSession() {
  return ask({
    title: "Open a session",
    says: [
      "You get a GPU with this much memory as soon as there is room. It is yours while you use it, and given back when you do not.",
    ],
    fields: [
      {
        name: "vram",
        label: "Memory (VRAM)",
        value: "1GiB",
        required: true,
        hint: "a size, such as 512MiB or 8GB",
      },
      {
        name: "ttl",
        label: "Given back when unused for",
        value: "5m",
        required: true,
        hint: "a time, such as 90s or 5m",
      },
      {
        name: "tier",
        label: "Tier",
        type: "select",
        value: "interactive",
        options: [
          ["interactive", "interactive: served first"],
          ["batch", "batch: waits for interactive"],
          ["spot", "spot: cheapest, may be taken at any moment"],
        ],
      },
      {
        name: "checkpoint",
        label: "Checkpoint (may be empty)",
        hint: "a name under which the session's state is kept, and found again after a loss",
      },
      { name: "name", label: "Name (may be empty)", hint: "what you call it here" },
      { name: "offers", label: "Offer me less if that is free now", type: "check", value: true },
    ],
    verb: "Open the session",
    act: (values) => {
      const body = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ""));
      return does(
        () => send("POST", "v1/sessions", body),
        (session) => `Session ${nameOf(session)} is opened. It is ${session.status}.`,
      );
    },
  });
}

export const accept = (session) =>
  atOnce(
    () => send("POST", `v1/sessions/${part(session.id)}/accept`),
    () => `Offer accepted: ${nameOf(session)} gets ${size(session.offer?.vram_bytes)}.`,
  );

export const decline = (session) =>
  atOnce(
    () => send("POST", `v1/sessions/${part(session.id)}/decline`),
    () => `Offer declined: ${nameOf(session)} keeps its place and waits for ${size(session.vram_bytes)}.`,
  );

export const resume = (session) =>
  atOnce(
    () => send("POST", `v1/sessions/${part(session.id)}/resume`),
    (now) => `${nameOf(session)} wants a GPU again. It is ${now.status}.`,
  );

export function end(session) {
  const held = ["active", "revoking"].includes(session.status);
  return ask({
    title: `End ${nameOf(session)}?`,
    says: [
      held
        ? "Its GPU is given back at once, what runs in it is stopped, and what it holds in memory is gone."
        : "It leaves the waitlist, or is forgotten if it had a GPU before.",
      session.checkpoint
        ? `The checkpoint “${session.checkpoint}” stays.`
        : "It has no checkpoint: nothing of its state is kept.",
      "This cannot be undone.",
    ],
    verb: "End the session",
    danger: true,
    act: () =>
      does(() => send("DELETE", `v1/sessions/${part(session.id)}`), `Session ${nameOf(session)} is ended.`),
  });
}

export const offerWords = (offer) =>
  offer.sentence ||
  [
    `${size(offer.vram_bytes)} now`,
    offer.price_per_hour ? `at ${price(offer.price_per_hour)} per GPU-hour` : "",
    Number.isFinite(offer.preemption_odds) ? `preempted with odds of ${percent(offer.preemption_odds)}` : "",
  ]
    .filter(Boolean)
    .join(", ");

// operators

export function revoke({ id, tenant, vram_bytes: bytes, devices = [], name = "" }) {
  return ask({
    title: `Revoke the lease of ${tenant || "this session"}?`,
    says: [
      `Lease ${short(id)}${name ? ` (session ${name})` : ""}: ${size(bytes)} on ${devices.join(", ") || "no device yet"}.`,
      "Its holder is warned now, with your reason. When the grace is over it is fenced and torn down; a Receipt then says what was freed. What was committed stays; what was not is lost.",
    ],
    fields: [
      {
        name: "reason",
        label: "Reason",
        value: "",
        required: true,
        hint: "the holder reads it, for example: maintenance at noon",
      },
      {
        name: "grace",
        label: "Grace",
        value: "15s",
        required: true,
        hint: "time to save and leave, such as 15s; 0s takes it now",
      },
    ],
    verb: "Revoke the lease",
    danger: true,
    act: ({ reason, grace }) =>
      does(
        () => send("POST", `v1/leases/${part(id)}/revoke`, { reason, grace }),
        `Lease ${short(id)} of ${tenant} is revoked: ${reason}. It ends within ${grace}.`,
      ),
  });
}

const DEVICE = {
  drain: {
    title: "Drain",
    verb: "Drain the device",
    note: "out of service soon",
    says: ["No new lease is placed on it. Those that are on it go on until they end by themselves."],
    said: (id) => `${id} is draining: no new lease is placed on it.`,
  },
  quarantine: {
    title: "Quarantine",
    verb: "Quarantine the device",
    note: "",
    says: [
      "It is withheld: no new lease is placed on it until somebody clears it. Leases that are on it go on.",
    ],
    said: (id) => `${id} is withheld.`,
  },
  clear: {
    title: "Clear",
    verb: "Say that it is clean",
    note: "",
    says: [
      "You say that nothing of an earlier lease is left on it. It may be leased again at once, by anybody.",
    ],
    said: (id) => `${id} is cleared and may be leased again.`,
  },
};

export function device(what, { id, note }) {
  const words = DEVICE[what];
  return ask({
    title: `${words.title} ${id}?`,
    says: [...words.says, ...(what === "clear" && note ? [`It was withheld because: ${note}`] : [])],
    fields: [
      {
        name: "note",
        label: "Note",
        value: words.note,
        required: what !== "clear",
        hint: "why, for whoever looks at it next",
      },
    ],
    verb: words.verb,
    danger: what !== "drain",
    act: (values) => does(() => send("POST", `v1/devices/${part(id)}/${what}`, values), words.said(id)),
  });
}

/** What a tenant may hold, as the service names it. */
export const QUOTAS = [
  { name: "weight", label: "Weight (share when GPUs are short; 100 is usual)", kind: "number" },
  { name: "max_leases", label: "Leases at once", kind: "number" },
  { name: "max_vram_bytes", label: "VRAM at once", kind: "size" },
  { name: "max_waiting", label: "Places in the waitlist", kind: "number" },
  { name: "max_sessions", label: "Sessions open at once", kind: "number" },
  { name: "max_storage_bytes", label: "Storage of checkpoints", kind: "size" },
  { name: "gpu_seconds_per_day", label: "GPU time a day", kind: "time" },
];

const SHOWN = {
  number: (value) => String(value),
  size: (value) => (value ? size(value).replace(" ", "") : "0"),
  time: (value) => (value ? `${Math.round(value)}s` : "0"),
};
const READ = {
  number: (words) => (/^[0-9]+$/.test(words) ? Number(words) : NaN),
  size: parseSize,
  time: parseSpan,
};
const HINTS = { size: "a size, such as 32GB", time: "a time, such as 2h" };

export function quota(tenant) {
  const known = QUOTAS.filter(({ name }) => name in tenant.quotas);
  const before = Object.fromEntries(
    known.map(({ name, kind }) => [name, SHOWN[kind](tenant.quotas[name] ?? 0)]),
  );
  return ask({
    title: `Quotas of ${tenant.name}`,
    says: [
      `They count from the next request on: ${some(tenant.live ?? 0, "live lease")} and what waits are not touched. 0 is no limit.`,
    ],
    fields: known.map(({ name, label, kind }) => ({
      name,
      label,
      value: before[name],
      type: kind === "number" ? "number" : "text",
      hint: HINTS[kind],
    })),
    verb: "Set the quotas",
    act: (values) => {
      const body = {};
      const said = [];
      for (const { name, label, kind } of known) {
        if (values[name] === before[name]) continue;
        body[name] = READ[kind](values[name]);
        if (!Number.isSafeInteger(body[name]))
          throw new Problem({
            message: `“${label}” cannot be read`,
            remedy: `write ${HINTS[kind] || "a whole number"}; 0 is no limit`,
          });
        said.push(`${label.toLowerCase().replace(/ \(.*/, "")} ${values[name]}`);
      }
      if (!said.length)
        throw new Problem({ message: "nothing was changed", remedy: "change a field, or cancel" });
      return does(
        () => send("PATCH", `v1/tenants/${part(tenant.name)}`, body),
        `Quotas of ${tenant.name} are set: ${said.join(", ")}.`,
      );
    },
  });
}
