"use strict";
// What every part uses: elements, the server, the look, the key, the figures.

const $ = (id) => document.getElementById(id);
const make = (tag, name = "", text = null, ...children) => {
  const found = document.createElement(tag);
  if (name) found.className = name;
  if (text !== null) found.textContent = text;
  found.append(...children);
  return found;
};
const draw = (tag, values = {}, text = null) => {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(values)) found.setAttribute(name, value);
  if (text !== null) found.textContent = text;
  return found;
};
const count = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value < 10000 ? count(value) : value < 1e6 ? (value / 1000).toFixed(value < 1e5 ? 1 : 0) + " k" : (value / 1e6).toFixed(2) + " M");
const percent = (value) => (100 * value).toFixed(1) + " %";
const span = (seconds) => (seconds < 0.9995 ? (seconds * 1000).toFixed(0) + " ms" : seconds < 60 ? seconds.toFixed(seconds < 10 ? 1 : 0) + " s" : seconds < 3600 ? (seconds / 60).toFixed(0) + " min" : (seconds / 3600).toFixed(1) + " h");
// Letters that turn the direction of a text, or that nobody sees, are shown as what they are.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
const plain = (text) => text.replace(ODD, "\u00b7");
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// ---- the server

const KEY = "radixrt-key";
class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}
async function ask(path, body, signal) {
  const headers = {}, key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = "Bearer " + key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body: body === undefined ? undefined : JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server cannot be reached");
  }
  if (answer.ok) return answer;
  let problem = answer.status + " " + answer.statusText;
  try { problem = (await answer.json()).error.message || problem; } catch { /* no JSON: the status says it */ }
  if (answer.status === 401) needKey(key ? "This key is not the right one." : "");
  throw new Refused(answer.status, problem);
}

let waitsForKey = false;
function needKey(problem) {
  $("key").hidden = false;
  if (waitsForKey) return;
  waitsForKey = true;
  $("key-says").textContent = problem;
  $("ask-key").showModal();
}
$("ask-key").addEventListener("close", () => {
  const value = $("key-value").value.trim();
  if ($("ask-key").returnValue !== "use" || !value) return;
  sessionStorage.setItem(KEY, value);
  $("key-value").value = "";
  waitsForKey = false;
  readModels();
  poll();
});
$("key-later").addEventListener("click", () => $("ask-key").close("later"));
$("key").addEventListener("click", () => { waitsForKey = false; needKey(""); });

const chosen = { model: "" };
async function readModels() {
  try {
    const names = (await (await ask("/v1/models")).json()).data.map((one) => one.id);
    chosen.model = names.includes(chosen.model) ? chosen.model : names[0];
    $("models").replaceChildren(...names.map((name) => make("option", "", name)));
    $("models").value = chosen.model;
    $("models").hidden = names.length < 2;
    $("model").hidden = names.length > 1;
    $("model").textContent = plain(chosen.model);
  } catch { /* the figures tell that the server does not answer */ }
}
$("models").addEventListener("change", () => {
  chosen.model = $("models").value;
  past.length = 0;
  runs.clear();
  poll();
});
const ofModel = (mark) => $("models").hidden ? "" : mark + "model=" + encodeURIComponent(chosen.model); // where the server has several

// ---- light and dark

const system = matchMedia("(prefers-color-scheme: dark)");
const paint = () => { document.documentElement.dataset.theme = localStorage.getItem("radixrt-theme") || (system.matches ? "dark" : "light"); };
system.addEventListener("change", paint);
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  if (next === (system.matches ? "dark" : "light")) localStorage.removeItem("radixrt-theme");
  else localStorage.setItem("radixrt-theme", next);
  paint();
});
paint();

// ---- which view

const tabs = Array.from(document.querySelectorAll("[role=tab]"));
const narrow = matchMedia("(max-width: 900px)");
function view(name) {
  document.body.dataset.view = name;
  if (name !== "chat") document.body.dataset.panel = name;
  const current = narrow.matches ? name : document.body.dataset.panel;
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === current));
    tab.tabIndex = tab.dataset.view === current ? 0 : -1;
  }
  if (name === "runs") readRuns();
}
for (const tab of tabs) tab.addEventListener("click", () => view(tab.dataset.view));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], shown = tabs.filter((tab) => tab.offsetParent);
  if (!step) return;
  const next = shown[(shown.indexOf(document.activeElement) + step + shown.length) % shown.length];
  view(next.dataset.view);
  next.focus();
  event.preventDefault();
});
const turned = () => {
  view(document.body.dataset.view);
  $("say").placeholder = narrow.matches ? "Message" : "Message — Enter sends, Shift+Enter a new line";
};
narrow.addEventListener("change", turned);

// ---- figures over time

const SHOWN = 150; // seconds of history
const past = [];
function chart(id, series, top) {
  const end = past[past.length - 1].at, long = Math.min(SHOWN, Math.max(20, end - past[0].at)), svg = $(id), most = top || Math.max(1e-9, ...past.flatMap((point) => series.map((one) => one.of(point)))) * 1.08;
  svg.setAttribute("viewBox", "0 0 100 38");
  svg.setAttribute("preserveAspectRatio", "none");
  const shapes = [draw("path", { class: "base", d: "M0 37.5H100" })];
  for (const one of series) {
    const points = past.map((point) => (100 - (100 * (end - point.at)) / long).toFixed(2) + " " + (37 - 36 * Math.min(1, one.of(point) / most)).toFixed(2));
    const first = points[0].split(" ")[0];
    if (one.fill) shapes.push(draw("path", { class: "f " + one.name[0], d: "M" + first + " 37.5L" + points.join("L") + "L100 37.5Z" }));
    shapes.push(draw("path", { class: "l " + one.name, d: "M" + points.join("L") }));
  }
  svg.replaceChildren(...shapes);
}
function figures(seen) {
  const s = seen.stats, at = performance.now() / 1000, last = past[past.length - 1];
  const point = { at, hit: s.hit_rate, best: s.optimal_hit_rate, used: s.pool_used / s.pool_tokens, held: (s.pool_used - s.pool_evictable) / s.pool_tokens, running: s.running, waiting: s.waiting, made: s.generated_tokens, found: s.cached_tokens, speed: 0, reuse: 0 };
  const since = past.find((one) => at - one.at < 2.5) || last; // speeds are those of the last seconds
  if (since && at > since.at) {
    point.speed = Math.max(0, point.made - since.made) / (at - since.at);
    point.reuse = Math.max(0, point.found - since.found) / (at - since.at);
  }
  past.push(point);
  while (past.length > 2 && at - past[1].at > SHOWN) past.shift();
  $("f-hit").textContent = s.prompt_tokens ? percent(s.hit_rate) : "–";
  $("f-optimal").textContent = s.prompt_tokens ? "optimal " + percent(s.optimal_hit_rate) : "optimal";
  $("f-pool").textContent = short(s.pool_used);
  $("f-pool-of").textContent = "of " + short(s.pool_tokens);
  $("f-held").textContent = short(s.pool_used - s.pool_evictable) + " in use";
  $("f-running").textContent = count(s.running);
  $("f-waiting").textContent = count(s.waiting) + " waiting";
  $("f-speed").textContent = point.speed < 100 ? point.speed.toFixed(1) : count(point.speed);
  $("f-prompt").textContent = short(point.reuse) + " reused";
  chart("c-hit", [{ name: "b dash", of: (p) => p.best }, { name: "a", of: (p) => p.hit, fill: true }], 1);
  chart("c-pool", [{ name: "a", of: (p) => p.used, fill: true }, { name: "c", of: (p) => p.held, fill: true }], 1);
  chart("c-load", [{ name: "b", of: (p) => p.waiting, fill: true }, { name: "c", of: (p) => p.running, fill: true }]);
  chart("c-speed", [{ name: "a", of: (p) => p.reuse }, { name: "c", of: (p) => p.speed, fill: true }]);
}

// ---- looking, a few times a second, and only while somebody looks

let looking = 0;
function health(kind, text) {
  $("health").className = "health " + kind;
  if ($("health").textContent !== text) $("health").textContent = text;
}
async function poll() {
  const turn = ++looking;
  while (turn === looking) {
    let pause = 1200;
    if (!document.hidden && !waitsForKey) {
      try {
        const seen = await (await ask("/v1/tree" + ofModel("?"))).json();
        if (turn !== looking) return;
        if (!chosen.model) readModels();
        const busy = seen.stats.running + seen.stats.waiting > 0;
        figures(seen);
        if (!narrow.matches || document.body.dataset.view === "tree") showTree(seen);
        if (document.body.dataset.panel === "runs") await readRuns();
        health(busy ? "busy" : "good", busy ? seen.stats.running + " running" : seen.loaded ? "idle" : "not loaded");
        pause = writing || busy ? 500 : 1000;
      } catch (error) {
        health("bad", error.status === 401 ? "needs a key" : error.status ? "the engine does not answer" : "not reachable");
        pause = 2500;
      }
    }
    await wait(pause);
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
