/* The views by name, as the address names them.
 *
 * Rules of every view:
 * - `show(dashboard)` brings it up to date. Only the one that is looked at is; the others are when somebody goes there.
 * - Nothing is drawn anew that did not change (making.keyed, tables.Table). The dashboard is the truth: a view keeps no state but what somebody
 *   typed or chose in it.
 */

import { Console } from "./console.js";
import { LeasesView } from "./view_leases.js";
import { ReceiptsView } from "./view_receipts.js";
import { StudioView } from "./view_studio.js";
import { UsageView } from "./view_usage.js";
import { WorkView } from "./view_work.js";

class SessionView {
  constructor() {
    this.console = new Console();
    this.node = this.console.node;
    this.title = this.console.title;
    this.of = "";
  }

  show(dashboard) {
    this.console.show(
      this.of,
      dashboard.sessions.find((session) => session.id === this.of),
      dashboard.me,
    );
  }
}

export const VIEWS = [
  { name: "studio", words: "Studio", view: StudioView },
  { name: "leases", words: "Leases", view: LeasesView },
  { name: "usage", words: "Usage", view: UsageView },
  { name: "work", words: "Jobs", view: WorkView },
  { name: "receipts", words: "Receipts", view: ReceiptsView },
  { name: "session", words: "", view: SessionView },
];
