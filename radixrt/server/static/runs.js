// Programs: which ran, each as a graph of its generations, and when each of them ran.

const runs = new Map(); // number -> run
let chosenRun = null, chosenBox = null, drawnRun = "";
let follow = Infinity; // a run of a higher number is the one that is waited for
const WIDE = 186, HIGH = 68, GAP = 18, LAYER = 104;

async function readRuns() {
  if (waitsForKey) return;
  const known = Array.from(runs.values()).filter((run) => run.over).map((run) => run.number).slice(-60);
  try {
    const seen = await (await ask("/v1/runs?known=" + known.join(",") + ofModel("&"))).json();
    for (const run of seen.runs) runs.set(run.number, run);
    for (const number of Array.from(runs.keys())) if (!seen.numbers.includes(number)) runs.delete(number);
    showRuns(seen.numbers);
  } catch { /* the figures tell it */ }
}

const failedRun = (run) => run.nodes.some((node) => node.state === "failed");
function showRuns(numbers) {
  const open = numbers.filter((number) => !runs.get(number).over).length;
  $("runs-say").textContent = !numbers.length ? "No program has run yet." : (open ? count(open) + " running, " : "") + count(numbers.length - open) + " ended";
  if (numbers.length && numbers[0] > follow) { [chosenRun, chosenBox, follow] = [numbers[0], null, Infinity]; }
  if (!runs.has(chosenRun)) { chosenRun = numbers.length ? numbers[0] : null; chosenBox = null; }
  const list = $("runs"), had = list.contains(document.activeElement);
  const shown = numbers.map((number) => {
    const run = runs.get(number), made = run.nodes.filter((node) => node.kind === "gen" || node.kind === "select").length;
    const button = make("button", (run.over ? "" : "open ") + (failedRun(run) ? "failed" : ""), null, make("b", "", plain(run.name || "program " + number)), make("span", "", made + (made === 1 ? " generation, " : " generations, ") + span(run.seconds)));
    button.type = "button";
    button.dataset.number = number;
    button.setAttribute("role", "option");
    button.setAttribute("aria-selected", String(number === chosenRun));
    button.tabIndex = number === chosenRun ? 0 : -1;
    return button;
  });
  const key = shown.map((button) => button.textContent + button.className + button.tabIndex).join("|");
  if (list.dataset.is !== key) {
    list.dataset.is = key;
    list.replaceChildren(...shown);
    if (had) { const button = list.querySelector("[aria-selected=true]"); if (button) button.focus(); }
  }
  showRun(runs.get(chosenRun));
}
function pickRun(number) { chosenRun = number; chosenBox = null; showRuns(Array.from($("runs").children, (one) => Number(one.dataset.number))); }
$("runs").addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) pickRun(Number(button.dataset.number)); });
$("runs").addEventListener("keydown", (event) => {
  const button = event.target.closest("button"), to = button && { ArrowRight: button.nextSibling, ArrowDown: button.nextSibling, ArrowLeft: button.previousSibling, ArrowUp: button.previousSibling }[event.key];
  if (!to) return;
  event.preventDefault();
  to.focus();
  pickRun(Number(to.dataset.number));
});

// Texts and marks are folded into the generation they lead to.
function folded(run) {
  const below = new Map(), boxes = [], boxOf = new Map(), before = new Map();
  for (const node of run.nodes) if (node.parent !== null) below.set(node.parent, (below.get(node.parent) || 0) + 1);
  const acts = (node) => node.kind === "gen" || node.kind === "select";
  for (const node of run.nodes) {
    const chain = [...(before.get(node.parent) || []), node];
    before.delete(node.parent);
    if (!acts(node) && below.get(node.id) === 1) { before.set(node.id, chain); continue; }
    const over = boxOf.get(chain[0].parent);
    if (over && chain.every((one) => one.kind === "role" || one.kind === "fork" || one.kind === "join")) {
      for (const one of chain) boxOf.set(one.id, over);
      continue;
    }
    const box = { at: boxes.length, main: node, nodes: chain, over, needs: new Set(), layer: 0 };
    for (const one of chain) boxOf.set(one.id, box);
    boxes.push(box);
  }
  for (const [, chain] of before) for (const one of chain) if (!boxOf.has(one.id) && boxOf.has(chain[0].parent)) boxOf.set(one.id, boxOf.get(chain[0].parent));
  for (const box of boxes) {
    for (const one of box.nodes) for (const id of one.needs || []) if (boxOf.has(id) && boxOf.get(id) !== box) box.needs.add(boxOf.get(id));
    for (const other of [box.over, ...box.needs]) if (other) box.layer = Math.max(box.layer, other.layer + 1);
  }
  return boxes;
}

function placed(boxes) {
  const layers = [];
  for (const box of boxes) (layers[box.layer] ||= []).push(box);
  const widest = Math.max(...layers.map((layer) => layer.length)), width = widest * (WIDE + GAP) - GAP;
  for (const layer of layers) {
    const middle = (box) => { const above = [box.over, ...box.needs].filter(Boolean); return above.length ? above.reduce((sum, one) => sum + one.x, 0) / above.length : 0; };
    const sorted = layer.map((box) => [middle(box), box]).sort((a, b) => a[0] - b[0] || a[1].at - b[1].at);
    const from = (width - (sorted.length * (WIDE + GAP) - GAP)) / 2;
    sorted.forEach(([, box], at) => { box.x = from + at * (WIDE + GAP); box.y = box.layer * LAYER; });
  }
  return { width, height: (layers.length - 1) * LAYER + HIGH };
}

function said(box) {
  return box.nodes.filter((node) => node !== box.main || node.kind === "text").map((node) => (node.kind === "role" ? (node.text ? node.text + ": " : "") : node.text || "")).join("");
}
const title = (box) => plain(box.main.name || ({ text: "text", fork: "fork × " + box.main.count, join: "join" }[box.main.kind] || box.main.kind + " " + box.main.id));
const fit = (text, most) => { const flat = plain(text).replace(/\s+/g, " ").trim(); return flat.length > most ? flat.slice(0, most - 1) + "…" : flat; };
const cost = (node) => (node.times ? node.times[1] + node.times[2] + node.times[3] : 0);
const PARTS = ["queue", "prefill", "decode"];

function showRun(run) {
  const place = $("run"), key = run ? JSON.stringify([run.number, run.over ? 0 : run, chosenBox]) : "";
  if (key === drawnRun) return;
  drawnRun = key;
  if (!run) { place.replaceChildren(make("p", "nothing", "Programs that run on this server are drawn here: what each generation shares with the others, what it waited for, and how long it took.")); return; }
  const boxes = folded(run);
  if (!boxes.length) { place.replaceChildren(make("p", "nothing", "This program has no steps yet.")); return; }
  const size = placed(boxes), longest = Math.max(1e-9, ...boxes.map((box) => cost(box.main)));
  const svg = draw("svg", { width: size.width + 8, height: size.height + 8, viewBox: `-4 -4 ${size.width + 8} ${size.height + 8}`, role: "group", "aria-label": "The graph of the program" });
  for (const box of boxes) {
    for (const other of [box.over, ...box.needs]) {
      if (!other) continue;
      const x1 = other.x + WIDE / 2, y1 = other.y + HIGH, x2 = box.x + WIDE / 2, bend = (box.y - y1) / 2;
      svg.append(draw("path", { class: "edge" + (other === box.over ? "" : " names"), d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${box.y - bend} ${x2} ${box.y}` }));
    }
  }
  for (const box of boxes) {
    const node = box.main, acts = node.kind === "gen" || node.kind === "select", lit = box.main.id === chosenBox;
    const group = draw("g", { class: [acts ? "" : "plain", node.state, lit ? "lit" : ""].join(" "), transform: `translate(${box.x} ${box.y})`, tabindex: 0, role: "button", "data-box": node.id, "aria-label": title(box) + ", " + node.state + (node.times ? ", " + span(cost(node)) : "") });
    group.append(draw("rect", { class: "card", width: WIDE, height: HIGH, rx: 9 }), draw("text", { class: "name", x: 10, y: 18 }, fit(title(box), 17)));
    if (acts) {
      group.append(draw("text", { class: "q", x: WIDE - 10, y: 18, "text-anchor": "end" }, node.times ? span(cost(node)) : node.state));
      group.append(draw("text", { class: node.error ? "q bad" : "q", x: 10, y: 35 }, fit(node.error || node.text || said(box), 28)));
      let x = 10;
      if (node.times) for (const [at, part] of PARTS.entries()) {
        const width = ((WIDE - 20) * node.times[at + 1]) / longest;
        group.append(draw("rect", { class: "t-" + part, x, y: 42, width: Math.max(0, width), height: 5, rx: 1.5 }));
        x += width;
      }
      if (node.tokens) group.append(draw("text", { class: "q tiny", x: 10, y: 60 }, count(node.tokens[0]) + " cached, " + count(node.tokens[1]) + " new, " + count(node.tokens[2]) + " made"));
    } else {
      group.append(draw("text", { class: "q", x: 10, y: 36 }, fit(said(box), 28)), draw("text", { class: "q", x: 10, y: 53 }, box.nodes.length > 1 ? box.nodes.length + " steps" : ""));
    }
    svg.append(group);
  }
  const canvas = make("div", "canvas", null, svg), head = make("h3", "", plain(run.name || "program " + run.number) + " — " + (run.over ? span(run.seconds) : "running") + (run.more ? ", the first " + run.nodes.length + " of " + (run.nodes.length + run.more) + " steps" : ""));
  const old = place.querySelector(".canvas"), at = old ? [old.scrollLeft, old.scrollTop] : [Math.max(0, (size.width - place.clientWidth) / 2), 0], had = place.contains(document.activeElement) ? document.activeElement.dataset.box : null;
  const lit = boxes.find((box) => box.main.id === chosenBox);
  place.replaceChildren(head, canvas, ...(lit ? [detail(lit)] : []), make("h3", "", "When"), timeline(run, boxes));
  [canvas.scrollLeft, canvas.scrollTop] = at;
  if (had) { const again = place.querySelector(`g[data-box="${had}"]`); if (again) again.focus({ preventScroll: true }); }
}

function detail(box) {
  const node = box.main, facts = [node.kind + " " + node.id, node.state];
  if (node.times) facts.push("started after " + span(node.times[0]), "waited " + span(node.times[1]), "read " + span(node.times[2]), "wrote " + span(node.times[3]));
  if (node.samples > 1) facts.push("the first of " + node.samples + " samples");
  const found = make("div", "detail", null, make("b", "", title(box)), make("div", "says", facts.join(" · ")));
  if (said(box)) found.append(make("pre", "", plain(said(box))));
  if (node.kind !== "text" && node.text) found.append(make("pre", "", "→ " + plain(node.text)));
  if (node.error) found.append(make("p", "error", plain(node.error)));
  return found;
}

function timeline(run, boxes) {
  const timed = boxes.filter((box) => box.main.times && (box.main.kind === "gen" || box.main.kind === "select")).slice(0, 60);
  const end = Math.max(1e-6, ...timed.map((box) => box.main.times[0] + cost(box.main))), left = 116, width = Math.max(260, $("run").clientWidth - 28), scale = (width - left - 56) / end;
  const svg = draw("svg", { width, height: timed.length * 22 + 26, role: "img", "aria-label": "When each generation ran" });
  timed.forEach((box, row) => {
    const times = box.main.times, y = row * 22;
    let x = left + times[0] * scale;
    svg.append(draw("text", { x: 0, y: y + 14 }, fit(title(box), 16)), draw("path", { class: "base", d: `M${left} ${y + 20.5}H${width}` }));
    for (const [at, part] of PARTS.entries()) {
      const wide = times[at + 1] * scale;
      svg.append(draw("rect", { class: "t-" + part, x, y: y + 4, width: Math.max(wide, at === 2 ? 1.5 : 0), height: 12, rx: 2 }));
      x += wide;
    }
    svg.append(draw("text", { class: "q", x: x + 6, y: y + 14 }, span(cost(box.main))));
  });
  let x = left;
  for (const [at, name] of ["waited", "read the prompt", "wrote"].entries()) {
    svg.append(draw("rect", { class: "t-" + PARTS[at], x, y: timed.length * 22 + 10, width: 9, height: 9, rx: 2 }), draw("text", { class: "q", x: x + 14, y: timed.length * 22 + 18.5 }, name));
    x += 30 + name.length * 6;
  }
  return make("div", "canvas", null, svg);
}

const pickBox = (event) => {
  const group = event.target.closest("g[data-box]");
  if (!group) return;
  const id = Number(group.dataset.box);
  chosenBox = chosenBox === id ? null : id;
  showRun(runs.get(chosenRun));
  event.preventDefault();
};
$("run").addEventListener("click", pickBox);
$("run").addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") pickBox(event); });

// ---- a program to look at

const EXAMPLE = (() => {
  const nodes = [];
  const add = (kind, parent, more) => { nodes.push({ id: nodes.length, kind, parent, ...more }); return nodes.length - 1; };
  let at = add("role", null, { role: "user", begin: true });
  at = add("text", at, { parts: ["A village wants to use its old water mill again. Name one use for it."] });
  at = add("role", at, { role: "user", begin: false });
  at = add("role", at, { role: "assistant", begin: true });
  const fork = add("fork", at, { count: 3 });
  const ideas = ["teacher", "baker", "engineer"].map((who) => add("gen", add("text", fork, { parts: [`As a ${who}, I would`] }), { name: who, params: { max_tokens: 28, temperature: 0.8 } }));
  const all = add("text", fork, { parts: ideas.flatMap((id, n) => [`\n${n + 1}. I would`, { ref: id }]).concat(["\nThe best of these is number"]) });
  const best = add("select", all, { name: "best", choices: [[" 1"], [" 2"], [" 3"]] });
  add("gen", add("text", best, { parts: [", because"] }), { name: "reason", params: { max_tokens: 28 } });
  return { version: 1, name: "mill", stream: false, nodes };
})();
$("example").addEventListener("click", async () => {
  $("example").disabled = true;
  $("runs-error").hidden = true;
  const look = setInterval(readRuns, 300);
  follow = Math.max(0, ...runs.keys());
  try { await ask("/v1/programs" + ofModel("?"), EXAMPLE); } catch (error) {
    $("runs-error").textContent = plain(error.message);
    $("runs-error").hidden = false;
  }
  clearInterval(look);
  await readRuns();
  $("example").disabled = false;
});
