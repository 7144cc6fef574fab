/* Tables that live: rows by key, and only the cells that changed are touched.
 *
 * Rules of this file:
 * - A column says what a cell shows (`value`, text) and, where text is not enough, how (`draw`); `draw` runs only when `value` changed.
 * - Every table has a caption, scopes, and roles of its own: on a phone the rows are drawn as cards, and CSS that does so would else take the
 *   table away from screen readers.
 */

import { keyed, make, setHidden, setText } from "./making.js";
import { countdown, stop } from "./ticks.js";

export class Table {
  /** columns: {name, value(row), draw?(cell, row), until?(row), kind?: 'number'|'long'|'actions'}; the first names the row.
   * Behind `most` rows a button shows the rest: one screen is to tell the state. `tall` names the
   * columns' widths in the style sheet: rows that nobody sees are then not laid out, however many there are. */
  constructor({ caption, columns, keyOf, empty, act = () => {}, most = Infinity, tall = "" }) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.body = make("tbody", { role: "rowgroup" });
    const head = columns.map((column) =>
      make("th", { scope: "col", role: "columnheader", class: column.kind, text: column.name }),
    );
    this.table = make(
      "table",
      { role: "table", class: tall ? `tall ${tall}` : null },
      make("caption", { text: caption }),
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)),
      this.body,
    );
    this.empty = make("p", { class: "empty" }, ...empty);
    this.most = most;
    this.more = make("button", { type: "button", class: "quiet more", hidden: true });
    this.node = make("div", { class: "table" }, this.table, this.empty, this.more);
    this.rows = new Map();
    this.more.addEventListener("click", () => {
      this.everything = !this.everything;
      this.show(this.all);
    });
    this.body.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-act]");
      const line = button && button.closest("tr");
      if (line && this.rows.has(line.dataset.key))
        act(button.dataset.act, this.rows.get(line.dataset.key), button);
    });
  }

  show(all) {
    const rows = this.everything ? all : all.slice(0, this.most);
    setHidden(this.more, all.length <= this.most);
    if (all.length > this.most)
      setText(this.more, this.everything ? `Show the first ${this.most} only` : `Show all ${all.length}`);
    this.all = all;
    this.rows = new Map(rows.map((row) => [String(this.keyOf(row)), row]));
    setHidden(this.table, rows.length === 0);
    setHidden(this.empty, rows.length !== 0);
    keyed(
      this.body,
      rows,
      (row) => String(this.keyOf(row)),
      (row) => this.line(row),
      (line, row) => this.change(line, row),
    );
  }

  line(row) {
    const line = make("tr", { role: "row" });
    line.dataset.key = this.keyOf(row);
    line.values = [];
    for (const [place, column] of this.columns.entries()) {
      const cell = place
        ? make("td", { role: "cell", class: column.kind })
        : make("th", { role: "rowheader", scope: "row", class: column.kind });
      cell.dataset.label = column.name;
      line.append(cell);
    }
    return line;
  }

  change(line, row) {
    const { columns } = this;
    for (let place = 0; place < columns.length; place++) {
      const column = columns[place];
      const cell = line.children[place];
      const until = column.until ? column.until(row) : 0;
      if (until) {
        countdown(cell, until);
        line.values[place] = undefined;
        continue;
      }
      const value = column.value(row);
      if (line.values[place] === value) continue;
      if (column.until) stop(cell);
      line.values[place] = value;
      if (column.draw) column.draw(cell, row);
      else setText(cell, value);
    }
  }
}

/** Buttons of a row. Those that stay keep their place and the focus. */
export function buttons(cell, wanted) {
  keyed(
    cell,
    wanted,
    (one) => one.act,
    (one) => make("button", { type: "button", "data-act": one.act, class: one.class }),
    (node, one) => {
      setText(node, one.text);
      if (one.label) node.setAttribute("aria-label", one.label);
    },
  );
}
