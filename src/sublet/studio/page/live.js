/* What happens in the studio, as it happens: the stream of events, taken up again after every cut.
 *
 * Rules of this file:
 * - The stream is read with fetch, because an EventSource cannot send the token. After a cut it goes on behind the last event seen.
 * - Silence is a cut too: the service beats every 15 s.
 * - Whether the page is live is said whenever it changes, and only then.
 */

import { open, lines } from "./api.js";

const SILENCE_MS = 40_000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;

export class Live {
  /** tell(state, problem): 'live', 'cut' or 'off'. take(event): one row of the journal. */
  constructor({ tell, take }) {
    this.tell = tell;
    this.take = take;
    this.last = "";
    this.round = 0;
    this.cut = new AbortController();
    this.wake = () => {};
    addEventListener("online", () => this.wake());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.wake();
    });
  }

  /** From this row of the journal on: what came before is in the dashboard. */
  start(after) {
    this.stop();
    this.last = after === undefined || after === null ? "" : String(after);
    this.follow(this.round);
  }

  stop() {
    this.round += 1;
    this.cut.abort();
    this.wake();
  }

  async follow(round) {
    let pause = FIRST_PAUSE_MS;
    while (round === this.round) {
      try {
        await this.listen(round, () => {
          pause = FIRST_PAUSE_MS;
        });
        if (round === this.round) this.tell("cut");
      } catch (problem) {
        if (round !== this.round) return;
        this.tell("cut", problem.name === "AbortError" ? undefined : problem);
        if (problem.status === 401) return;
      }
      if (round !== this.round) return;
      await this.sleep(pause * (0.75 + Math.random() / 2));
      pause = Math.min(LONGEST_PAUSE_MS, pause * 2);
    }
  }

  async listen(round, good) {
    const cut = (this.cut = new AbortController());
    let heard = performance.now();
    const watch = setInterval(() => {
      if (performance.now() - heard > SILENCE_MS) cut.abort();
    }, 5000);
    try {
      const headers = { Accept: "text/event-stream" };
      if (this.last) headers["Last-Event-ID"] = this.last;
      const answer = await open("GET", "v1/events", { signal: cut.signal, headers });
      heard = performance.now();
      good();
      this.tell("live");
      let event = { data: [] };
      for await (const line of lines(answer, () => {
        heard = performance.now();
      })) {
        if (round !== this.round) return;
        if (line === "") {
          if (event.id !== undefined) this.last = event.id;
          if (event.data.length) this.hand(event.data.join("\n"));
          event = { data: [] };
        } else if (!line.startsWith(":")) {
          const [, field, value] = line.match(/^([^:]*):? ?(.*)$/);
          if (field === "data") event.data.push(value);
          else if (field === "id") event.id = value;
        }
      }
    } finally {
      clearInterval(watch);
      cut.abort();
    }
  }

  hand(data) {
    let event;
    try {
      event = JSON.parse(data);
    } catch {
      return;
    } // the next dashboard says what it was
    this.take(event);
  }

  sleep(ms) {
    return new Promise((over) => {
      const timer = setTimeout(over, ms);
      this.wake = () => {
        clearTimeout(timer);
        over();
      };
    });
  }
}
