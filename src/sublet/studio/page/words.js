/* Figures in words: sizes, times, money. Owns no state but the difference between the server's clock and this one.
 *
 * Rules of this file: nothing here touches the page; what is missing is "-", never 0.
 */

const NONE = "-";
let ahead = 0;

/** The server said what time it is. */
export function setClock(at) {
  if (Number.isFinite(at)) ahead = at - Date.now() / 1000;
}

/** Seconds since 1970 by the server's clock. */
export function now() {
  return Date.now() / 1000 + ahead;
}

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB"];
const DECIMAL = ["B", "KB", "MB", "GB", "TB"];

/** '8 GiB', '8 GB', '1.5 GB': the unit in which it is short, as the command line does. */
export function size(bytes) {
  if (!Number.isFinite(bytes)) return NONE;
  if (bytes <= 0) return "0";
  for (const [base, units] of [
    [1024, BINARY],
    [1000, DECIMAL],
  ]) {
    for (let power = units.length - 1; power > 0; power--) {
      const unit = base ** power;
      if (bytes >= unit && bytes % unit === 0 && bytes / unit < 10000)
        return `${bytes / unit} ${units[power]}`;
    }
  }
  let power = Math.min(DECIMAL.length - 1, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${DECIMAL[power]}`;
}

const pad = (number) => String(number).padStart(2, "0");

/** '4:05', '1 h 12 m', '3 d 4 h': short enough for a cell, and of a width that does not jump. */
export function span(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 3600) return `${Math.floor(whole / 60)}:${pad(whole % 60)}`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${pad(Math.floor(whole / 60) % 60)} m`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole / 3600) % 24} h`;
}

/** '12 ms', '3.4 s', '4 m 5 s', '1 h 12 m': how long something took. */
export function took(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} m ${Math.floor(seconds % 60)} s`;
  return span(seconds);
}

export function clock(at) {
  if (!at) return NONE;
  const date = new Date(at * 1000);
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return now() - at < 20 * 3600
    ? time
    : `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${time}`;
}

/** What something cost: decimal text as it came, to the fourth place, so that columns stand in line. */
export function money(text) {
  if (text === null || text === undefined || text === "") return NONE;
  const [whole, rest = ""] = String(text).split(".");
  return `${whole}.${rest.slice(0, 4).padEnd(4, "0")}`;
}

/** What something costs an hour: '2.50'. */
export function price(text) {
  return money(text).replace(/0{1,2}$/, "");
}

export function percent(part) {
  return Number.isFinite(part) ? `${Math.round(part * 100)} %` : NONE;
}

export function count(number) {
  return Number.isFinite(number) ? String(number) : NONE;
}

export function some(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

export function text(value) {
  return value === null || value === undefined || value === "" ? NONE : String(value);
}

/** An id is for copying; the eye needs its end. */
export function short(id) {
  return id && id.length > 10 ? `${id[0]}…${id.slice(-6)}` : text(id);
}

const SIZE_UNITS = new Map([
  ["", 1],
  ["b", 1],
  ...["k", "m", "g", "t"].flatMap((letter, place) => [
    [`${letter}b`, 1000 ** (place + 1)],
    [`${letter}ib`, 1024 ** (place + 1)],
  ]),
]);
const SPAN_UNITS = new Map([
  ["", 1],
  ["s", 1],
  ["m", 60],
  ["h", 3600],
  ["d", 86400],
]);

/** Bytes of '32GB' or '512 MiB'; NaN when it is no size. */
export function parseSize(words) {
  const found = words.trim().match(/^([0-9]+(?:\.[0-9]+)?) *([a-zA-Z]*)$/);
  return found ? Math.round(Number(found[1]) * (SIZE_UNITS.get(found[2].toLowerCase()) ?? NaN)) : NaN;
}

/** Seconds of '2h', '90s' or '1h 30m'; NaN when it is no time. */
export function parseSpan(words) {
  const found = words.trim().match(/^(?:[0-9]+(?:\.[0-9]+)? *[smhd]? *)+$/) && [
    ...words.matchAll(/([0-9]+(?:\.[0-9]+)?) *([smhd]?)/g),
  ];
  return found
    ? Math.round(found.reduce((sum, [, number, unit]) => sum + Number(number) * SPAN_UNITS.get(unit), 0))
    : NaN;
}
