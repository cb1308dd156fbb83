// The radix tree: a map (left to right: tokens, top to bottom: branches) and a list of rows.

const rows = new Map(); // id -> {element, ...}
const blocks = new Map();
const opened = new Set(); // rows that show their whole text
const closed = new Set(); // rows that hide what is below them
const order = new Map(); // id -> when it was seen first
let current = null; // the row that the keyboard is at
let mine = ""; // the id of this page's own request

const MAP_HEIGHT = 190;

function grown(seen) {
  const byId = new Map(seen.nodes.map((node) => [node.id, { ...node, below: [], chips: [], lanes: 0, from: 0, level: 1 }]));
  const top = [];
  for (const node of byId.values()) {
    if (!order.has(node.id)) order.set(node.id, order.size);
    const parent = byId.get(node.parent);
    node.level = parent ? parent.level + 1 : 1;
    node.from = parent ? parent.from + parent.tokens : 0;
    (parent ? parent.below : top).push(node);
  }
  for (const one of seen.requests) if (byId.has(one.node)) byId.get(one.node).chips.push(one);
  if (order.size > 5000) for (const id of Array.from(order.keys())) if (!byId.has(id)) order.delete(id);
  const flat = [];
  const stack = top.sort((a, b) => order.get(b.id) - order.get(a.id));
  while (stack.length) {
    const node = stack.pop();
    flat.push(node);
    stack.push(...node.below.sort((a, b) => order.get(b.id) - order.get(a.id)));
  }
  return flat;
}

const kind = (node) => (node.locks ? "use" : node.holds ? "held" : "");
function says(node) {
  if (narrow.matches && !node.locks && !node.holds && node.age >= 0) return span(node.age);
  if (node.locks) return "in use" + (node.locks > 1 ? " × " + node.locks : "");
  if (narrow.matches && node.holds) return "held";
  return (node.holds ? "held" : "evictable") + (node.age >= 0 ? " · " + span(node.age) : "");
}
function written(where, text, cut) {
  where.replaceChildren();
  plain(text).split("\n").forEach((line, at) => {
    if (at) where.append(make("span", "dim", "⏎"));
    where.append(line);
  });
  if (cut) where.append(make("span", "dim", " …"));
}

function showTree(seen) {
  const flat = grown(seen), hidden = seen.stats.cache_nodes - flat.length, cached = seen.cached_tokens;
  $("tree-says").textContent = flat.length ? count(cached) + " tokens cached in " + count(seen.stats.cache_nodes) + " nodes" + (hidden > 0 ? ", the " + flat.length + " last used are shown" : "") + (seen.texts ? "" : "; texts are hidden, as others use this server too") : "The cache is empty.";
  showMap(flat);
  const place = $("tree"), live = new Set(), had = place.contains(document.activeElement) && current;
  let before = null, hide = 0;
  for (const node of flat) {
    if (hide && node.level > hide) continue;
    hide = closed.has(node.id) ? node.level : 0;
    live.add(node.id);
    let row = rows.get(node.id);
    if (!row) rows.set(node.id, (row = newRow(node.id)));
    update(row, node);
    const follows = before ? before.nextSibling : place.firstChild;
    if (follows !== row.element) place.insertBefore(row.element, follows);
    before = row.element;
  }
  for (const [id, row] of rows) if (!live.has(id)) { row.element.remove(); rows.delete(id); }
  let nothing = $("nothing");
  if (!flat.length && !nothing) {
    nothing = make("p", "nothing", "Nothing is cached yet. Send a message: its tokens appear here as branches, and what the next one shares with it is not computed again.");
    nothing.id = "nothing";
    place.append(nothing);
  } else if (flat.length && nothing) nothing.remove();
  if (!rows.has(current)) current = flat.length ? flat[0].id : null;
  for (const [id, row] of rows) row.element.tabIndex = id === current ? 0 : -1;
  if (had && current && !place.contains(document.activeElement)) rows.get(current).element.focus({ preventScroll: true });
}

function newRow(id) {
  const mark = make("span", "mark"), text = make("span", "text"), more = make("span", "more"), chips = make("span", "chips"), tokens = make("span", "count"), state = make("span", "state");
  const line = make("div", "row", null, mark, text, more, chips, tokens, state), element = make("div", "node", null, line);
  element.setAttribute("role", "treeitem");
  element.dataset.id = id;
  return { element, text, more, chips, tokens, state, whole: null, shown: "" };
}

function update(row, node) {
  row.node = node;
  const { element } = row, old = !node.locks && !node.holds && node.age > 60;
  const name = "node " + kind(node) + (old ? " old" : "");
  if (element.className !== name) element.className = name;
  element.style.setProperty("--d", Math.min(node.level - 1, 14));
  element.style.setProperty("--fade", node.locks ? 1 : Math.max(0.25, 1 - Math.log10(1 + Math.max(0, node.age)) / 4).toFixed(2));
  element.setAttribute("aria-level", node.level);
  if (node.below.length) element.setAttribute("aria-expanded", String(!closed.has(node.id)));
  else element.removeAttribute("aria-expanded");
  const said = node.text === undefined ? null : node.text + (node.cut ? "" : node.end);
  const key = said + "|" + node.cut;
  if (row.shown !== key) {
    row.shown = key;
    if (said === null) row.text.replaceChildren(make("span", "dim", node.space ? "of a salted request: not shown" : "text not shown"));
    else written(row.text, said, node.cut);
  }
  const rest = node.children - node.below.length;
  row.more.textContent = closed.has(node.id) ? "▸ " + node.below.length : rest > 0 ? "+" + count(rest) + " not shown" : "";
  const chips = node.chips.slice(0, 4).map((one) => {
    const own = Boolean(mine) && one.id.startsWith(mine), name = own ? "you" : one.program || "request";
    return [name + (one.size > one.prompt ? " +" + (one.size - one.prompt) : one.computed < one.prompt ? " " + Math.floor((100 * one.computed) / one.prompt) + " %" : ""), own];
  });
  const wanted = chips.map(([text]) => text).join("|") + node.chips.length;
  if (row.chips.dataset.is !== wanted) {
    row.chips.dataset.is = wanted;
    row.chips.replaceChildren(...chips.map(([text, own]) => make("span", "chip" + (own ? " mine" : ""), plain(text))));
    if (node.chips.length > 4) row.chips.append(make("span", "more", "+" + (node.chips.length - 4)));
  }
  row.chips.title = node.chips.map((one) => one.id + ": " + one.size + " tokens").join("\n");
  row.tokens.textContent = count(node.tokens);
  row.tokens.title = count(node.tokens) + " tokens, from position " + count(node.from);
  row.state.textContent = says(node);
  if (opened.has(node.id)) {
    if (!row.whole) element.append((row.whole = make("div", "whole")));
    const full = key + node.tokens + node.locks + node.holds + node.chips.map((one) => one.size).join();
    if (row.whole.dataset.is !== full) {
      row.whole.dataset.is = full;
      const facts = [count(node.tokens) + " tokens from position " + count(node.from), count(node.locks) + " locks", count(node.holds) + " holds", count(node.children) + " branches", ...node.chips.map((one) => (one.program || "request") + " " + one.id + ": " + count(one.size) + " tokens")];
      row.whole.replaceChildren(plain(node.text || ""), node.cut ? make("em", "", "\n… " + count(node.tokens - 64) + " tokens …\n") : "", plain(node.end || ""), make("p", "", facts.join(" · ")));
    }
  } else if (row.whole) { row.whole.remove(); row.whole = null; }
}

// ---- the map

function showMap(flat) {
  const map = $("map");
  for (const node of flat.slice().reverse()) node.lanes = Math.max(1, node.below.reduce((sum, one) => sum + one.lanes, 0));
  const lanes = flat.filter((node) => node.level === 1).reduce((sum, node) => sum + node.lanes, 0);
  const height = lanes ? Math.min(MAP_HEIGHT, Math.max(34, lanes * 22)) : 0, lane = height / Math.max(1, lanes);
  const deepest = Math.max(1, ...flat.map((node) => node.from + node.tokens));
  const x = (tokens) => 100 * (tokens / deepest) ** 0.62; // the first tokens are shared most
  map.style.height = height + "px";
  const live = new Set(), next = new Map();
  let from = 0;
  for (const node of flat) {
    const parent = next.get(node.parent), top = parent ? parent.at : from;
    if (parent) parent.at += node.lanes; else from += node.lanes;
    next.set(node.id, { at: top });
    live.add(node.id);
    let block = blocks.get(node.id);
    const fresh = !block;
    if (fresh) { blocks.set(node.id, (block = make("div"))); block.dataset.id = node.id; map.append(block); }
    const name = kind(node) + (fresh ? " fresh" : "") + (node.id === current && document.activeElement && document.activeElement.dataset.id === current ? " lit" : "");
    if (block.className !== name) block.className = name;
    const left = x(node.from), width = x(node.from + node.tokens) - left;
    Object.assign(block.style, { left: left.toFixed(3) + "%", width: `max(2px, calc(${width.toFixed(3)}% - 1px))`, top: (top * lane).toFixed(2) + "px", height: Math.max(1, node.lanes * lane - (lane > 4 ? 1.5 : 0)).toFixed(2) + "px", opacity: node.locks || node.holds ? 1 : Math.max(0.5, 1 - Math.log10(1 + Math.max(0, node.age)) / 7).toFixed(2) });
    const text = node.lanes * lane >= 13 && width > 5 ? plain(node.text || "").replaceAll("\n", "⏎") : "";
    if (block.textContent !== text) block.textContent = text;
    block.title = count(node.tokens) + " tokens, " + says(node);
  }
  for (const [id, block] of blocks) if (!live.has(id)) { block.remove(); blocks.delete(id); }
}
$("map").addEventListener("click", (event) => {
  const id = event.target.dataset.id;
  if (rows.has(id)) { go(id); rows.get(id).element.scrollIntoView({ block: "center" }); }
});

// ---- keyboard and pointer

function go(id) {
  if (rows.has(current)) rows.get(current).element.tabIndex = -1;
  current = id;
  rows.get(id).element.tabIndex = 0;
  rows.get(id).element.focus();
  for (const [other, block] of blocks) block.classList.toggle("lit", other === id);
}
function toggle(id, set) {
  if (set.has(id)) set.delete(id); else set.add(id);
  if (set === opened) update(rows.get(id), rows.get(id).node); else poll();
}
$("tree").addEventListener("click", (event) => {
  const node = event.target.closest(".node");
  if (!node || String(getSelection())) return;
  go(node.dataset.id);
  if (!event.target.closest(".whole")) toggle(node.dataset.id, opened);
});
$("tree").addEventListener("keydown", (event) => {
  const node = event.target.closest(".node"), id = node && node.dataset.id;
  if (!id || event.ctrlKey || event.metaKey || event.altKey) return;
  const all = Array.from($("tree").querySelectorAll(".node")), at = all.indexOf(node), row = rows.get(id);
  const to = { ArrowDown: all[at + 1], ArrowUp: all[at - 1], Home: all[0], End: all[all.length - 1] }[event.key];
  if (to) go(to.dataset.id);
  else if (event.key === "Enter" || event.key === " ") toggle(id, opened);
  else if (event.key === "ArrowLeft" && row.node.below.length && !closed.has(id)) toggle(id, closed);
  else if (event.key === "ArrowLeft" && rows.has(row.node.parent)) go(row.node.parent);
  else if (event.key === "ArrowRight" && closed.has(id)) toggle(id, closed);
  else if (event.key === "ArrowRight" && row.node.below.length) go(row.node.below[row.node.below.length - 1].id);
  else return;
  event.preventDefault();
});
