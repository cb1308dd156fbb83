"""The style and the script of the page that ``lang.draw`` makes: plain CSS and JavaScript, without any text of a program."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfd; --card: #fff; --ink: #1c2026; --quiet: #5a6270; --rule: #d8dce3;
  --cached: #2b9a66; --computed: #e8890c; --generated: #3671d9; --queue: #a9b0bc; --crit: #7c3aed; --bad: #c92a2a; --tint: #f1f3f7; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171c; --card: #1d2128; --ink: #e6e9ee; --quiet: #a0a8b5; --rule: #363c47;
  --cached: #3fb67f; --computed: #f0a03c; --generated: #6f9ff0; --queue: #667080; --crit: #b08cff; --bad: #ff7b7b; --tint: #262b34; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
header, main { max-width: 1500px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 20px; } main { padding-bottom: 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 32px 0 8px; } h3 { font-size: 14px; margin: 16px 0 4px; }
header p { margin: 4px 0 0; } a { color: var(--generated); }
.quiet { color: var(--quiet); } .bad { color: var(--bad); overflow-wrap: anywhere; }
.note { background: var(--tint); border-inline-start: 3px solid var(--computed); padding: 6px 12px; margin: 8px 0; }
.skip { position: absolute; inset-inline-start: -9999px; } .skip:focus { inset-inline-start: 8px; top: 8px; background: var(--card); padding: 4px 8px; }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 8px 14px; min-width: 112px; }
.cards dt { color: var(--quiet); font-size: 13px; } .cards dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
.chain { display: flex; flex-wrap: wrap; list-style: none; margin: 0; padding: 0; }
.chain li + li::before { content: "\\2192"; color: var(--quiet); margin: 0 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0 0 8px; padding: 0; font-size: 13px; align-items: center; }
.key { display: inline-block; width: 14px; height: 10px; margin-inline-end: 6px; border-radius: 2px; }
.key.cached { background: var(--cached); } .key.computed { background: var(--computed); } .key.generated { background: var(--generated); }
.key.queue { background: var(--queue); } .key.crit { border: 2.5px solid var(--crit); height: 12px; }
.key.line { height: 0; border-top: 2px solid var(--quiet); border-radius: 0; width: 22px; vertical-align: middle; } .key.named { border-top-style: dashed; }
button, input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 2px 10px; }
button[aria-pressed=true] { background: var(--tint); border-color: var(--quiet); } input { width: 260px; max-width: 100%; }
.needs-script { display: none; } .js .needs-script { display: block; }
.canvas { overflow: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px; max-height: 78vh; }
.canvas svg#graph, .canvas svg#gantt { display: block; margin: 0 auto; } .canvas.fit svg#graph { max-width: 100%; height: auto; }
.js .split { display: grid; grid-template-columns: minmax(0, 1fr) minmax(300px, 420px); gap: 14px; align-items: start; }
.js #panel { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px; max-height: 78vh; overflow: auto; }
#panel h3 { margin-top: 0; font-size: 16px; overflow-wrap: anywhere; }
@media (max-width: 900px) { .js .split { grid-template-columns: minmax(0, 1fr); } header, main { padding-inline: 12px; } }
svg text { fill: var(--ink); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; white-space: pre; } svg text.name { font-weight: 650; font-size: 13px; }
svg text.quiet { fill: var(--quiet); } svg text.small { fill: var(--quiet); font-size: 10.5px; } svg text.bad { fill: var(--bad); }
svg a { text-decoration: none; } .box svg > rect { fill: var(--bg); stroke: var(--rule); stroke-width: 1.2; }
.box.text svg > rect, .box.join svg > rect, .box.fork svg > rect, .box.role svg > rect { fill: var(--tint); }
.box.critical svg > rect { stroke: var(--crit); stroke-width: 2.6; } .box.failed svg > rect { stroke: var(--bad); stroke-width: 2.6; stroke-dasharray: 5 3; }
.box:hover svg > rect, .box:focus-visible svg > rect, .box.current svg > rect { fill: var(--tint); stroke: var(--generated); stroke-width: 3; }
.box:focus, .row:focus { outline: none; }
.track { fill: var(--rule); opacity: .5; } .cached { fill: var(--cached); } .computed { fill: var(--computed); } .generated { fill: var(--generated); } .queue { fill: var(--queue); }
.edge { fill: none; stroke: var(--quiet); stroke-width: 1.3; marker-end: url(#tip); opacity: .75; } .edge.named { stroke-dasharray: 5 4; }
.edge.critical { stroke: var(--crit); stroke-width: 2.4; opacity: 1; marker-end: url(#tip-hot); } #tip path { fill: var(--quiet); } #tip-hot path { fill: var(--crit); }
.grid { stroke: var(--rule); stroke-width: 1; } .hit { fill: transparent; } .row.critical text { fill: var(--crit); font-weight: 650; }
.row:hover .hit, .row:focus-visible .hit, .row.current .hit { fill: var(--tint); }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; margin: 6px 0; content-visibility: auto; contain-intrinsic-size: auto 40px; }
summary { padding: 6px 12px; cursor: pointer; display: flex; gap: 10px; align-items: baseline; flex-wrap: wrap; }
summary::before { content: "\\25B8"; color: var(--quiet); } details[open] > summary::before { content: "\\25BE"; }
summary .snippet { flex: 1 1 240px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: var(--quiet); min-width: 0; }
.figures { font-size: 13px; color: var(--quiet); font-variant-numeric: tabular-nums; }
.kind, .mark { font-size: 12px; border: 1px solid var(--rule); border-radius: 4px; padding: 0 6px; } .mark.crit { color: var(--crit); border-color: currentColor; }
.mark.bad { border-color: currentColor; } .body { padding: 0 14px 10px; } .body p { margin: 6px 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--tint); border-radius: 6px; padding: 8px 10px; margin: 6px 0; unicode-bidi: isolate;
  font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; max-height: 60vh; overflow: auto; }
pre.made { border-inline-start: 3px solid var(--generated); } .ref { text-decoration: underline dashed; text-underline-offset: 3px; } .arg { color: var(--crit); }
.cut { color: var(--computed); } .role { font-size: 12px; color: var(--quiet); } .params, code { overflow-wrap: anywhere; font-size: 13px; }
table { border-collapse: collapse; font-size: 13px; margin: 6px 0; } td, th { text-align: start; padding: 2px 10px 2px 0; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
.best { font-weight: 650; } .best td:first-child::before { content: "\\2713  "; color: var(--cached); }
"""

SCRIPT = """
(() => {
  "use strict";
  const all = (what, where = document) => Array.from(where.querySelectorAll(what));
  const panel = document.getElementById("panel"), canvas = document.querySelector(".canvas");
  const filter = document.getElementById("filter"), found = document.getElementById("found");
  document.documentElement.classList.add("js");
  const show = (link) => {
    const step = document.getElementById(link.getAttribute("href").slice(1));
    if (!step || !panel) return;
    const title = document.createElement("h3");
    title.textContent = step.querySelector("summary b").textContent;
    panel.replaceChildren(title, step.querySelector(".body").cloneNode(true));
    panel.scrollTop = 0;
    for (const other of all(".current")) other.classList.remove("current");
    for (const other of all('svg a[href="' + link.getAttribute("href") + '"]')) other.classList.add("current");
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-box]");
    if (!link || !panel || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show(link);
    if (!panel.contains(link) && panel.getBoundingClientRect().bottom < 0) panel.scrollIntoView({ block: "nearest" });
  });
  document.addEventListener("focusin", (event) => {
    if (event.target.matches("a.box, a.row")) show(event.target);
  });
  const fit = document.getElementById("fit");
  if (fit) {
    const press = () => fit.setAttribute("aria-pressed", canvas.classList.toggle("fit"));
    fit.addEventListener("click", press);
    if (canvas.scrollWidth < 1.7 * canvas.clientWidth) press();
    canvas.scrollLeft = (canvas.scrollWidth - canvas.clientWidth) / 2;
  }
  if (filter) filter.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    let count = 0;
    for (const step of all(".list > details")) {
      step.hidden = wanted !== "" && !step.textContent.toLowerCase().includes(wanted);
      count += !step.hidden;
    }
    found.textContent = wanted ? count + " steps" : "";
  });
  const follow = () => {
    const step = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (step && step.tagName === "DETAILS") step.open = true;
  };
  addEventListener("hashchange", follow);
  follow();
})();
"""
