/* Nodes, made by name. Rules of this file: text is only ever put in as text, and nothing is parsed as HTML, so that whatever a
 * tenant wrote into a name or a reason stays words. No style attribute: the page's policy forbids it. */

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, facts = {}, ...children) {
  return fill(document.createElement(tag), facts, children);
}

export function draw(tag, facts = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), facts, children);
}

function fill(node, facts, children) {
  for (const [name, value] of Object.entries(facts)) {
    if (name === "text") node.textContent = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Only if it differs: a node that is not touched is not laid out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setFact(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** The children of a node are those of these rows, in their order: what is there already is kept, moved only if it must, and
 * keeps the focus. `make(row)` makes one, `change(node, row)` brings one up to date. */
export function keyed(parent, rows, keyOf, made, change) {
  const known = parent.keyed || (parent.keyed = new Map());
  const wanted = new Map(rows.map((row) => [keyOf(row), row]));
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      giveFocusOn(node);
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstChild;
  for (const [key, row] of wanted) {
    let node = known.get(key);
    if (!node) {
      node = made(row);
      known.set(key, node);
    }
    change(node, row);
    if (node === place) place = place.nextSibling;
    else put(parent, node, place);
  }
}

function put(parent, node, before) {
  if (parent.moveBefore && node.parentNode === parent) {
    parent.moveBefore(node, before);
    return;
  }
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  parent.insertBefore(node, before);
  if (focused) focused.focus({ preventScroll: true });
}

/** A row goes that had the focus: it goes to the section's heading, not to the top of the page. */
export function giveFocusOn(node) {
  if (!node.contains(document.activeElement)) return;
  const heading = node.closest("section")?.querySelector("h1, h2, h3");
  if (heading) {
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
}
