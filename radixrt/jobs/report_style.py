"""The style of a job's report: plain CSS, without any text of a document."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfd; --card: #fff; --ink: #1c2026; --quiet: #5a6270; --rule: #d8dce3; --tint: #f1f3f7;
  --cached: #2b9a66; --computed: #e8890c; --generated: #3671d9; --documents: #7c3aed; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171c; --card: #1d2128; --ink: #e6e9ee; --quiet: #a0a8b5; --rule: #363c47; --tint: #262b34;
  --cached: #3fb67f; --computed: #f0a03c; --generated: #6f9ff0; --documents: #b08cff; --bad: #ff7b7b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
header, main { max-width: 1160px; margin: 0 auto; padding: 0 24px; } header { padding-top: 28px; } main { padding-bottom: 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 14px; margin: 0; overflow-wrap: anywhere; } p { margin: 4px 0; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); } .bad { color: var(--bad); }
.note { background: var(--tint); border-inline-start: 3px solid var(--computed); padding: 6px 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: 10px; margin: 20px 0 0; }
.cards div, article, figure, details { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.cards div { padding: 8px 14px; } .cards dt { color: var(--quiet); font-size: 13px; white-space: nowrap; }
.cards dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 10px 14px 6px; } figcaption { font-size: 13px; color: var(--quiet); margin-bottom: 2px; } .legend + figure { margin-top: 14px; }
svg { display: block; } svg text { fill: var(--quiet); font: 11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
.chart text { paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.chart svg { overflow: visible; }
.rule { fill: var(--rule); } .track { fill: var(--rule); opacity: .6; } .fill { fill: var(--cached); } rect.value { fill: var(--generated); }
.area { opacity: .2; stroke: none; } .curve { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.area.documents { fill: var(--documents); } .curve.documents { stroke: var(--documents); }
.area.generated, rect.generated { fill: var(--generated); } .curve.generated { stroke: var(--generated); }
.area.cached, rect.cached { fill: var(--cached); } .curve.cached { stroke: var(--cached); } rect.computed { fill: var(--computed); }
line.best { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 5 4; opacity: .7; } .chart text.best { fill: var(--ink); }
.stack { border-radius: 4px; margin: 8px 0; } .hist { margin-top: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0; padding: 0; font-size: 13px; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 14px; height: 10px; margin-inline-end: 6px; border-radius: 2px; }
.key.cached { background: var(--cached); } .key.computed { background: var(--computed); } .key.generated { background: var(--generated); }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); gap: 14px; }
article { padding: 12px 14px; min-width: 0; } .figures { display: flex; justify-content: space-between; gap: 10px; font-size: 13px; color: var(--quiet); margin: 2px 0 4px; }
.ends { display: flex; justify-content: space-between; gap: 8px; font-size: 11.5px; color: var(--quiet); font-variant-numeric: tabular-nums; white-space: nowrap; }
.top { list-style: none; margin: 10px 0 0; padding: 0; font-size: 13px; } .top li { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0 10px; margin-bottom: 4px; }
.top bdi { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } .top svg { grid-column: 1 / -1; } .count { color: var(--quiet); font-variant-numeric: tabular-nums; }
article p.quiet { font-size: 12.5px; margin-top: 6px; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 6px 14px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; } th { text-align: start; font-weight: 500; } thead th { color: var(--quiet); }
th, td { padding: 5px 18px 5px 0; border-bottom: 1px solid var(--rule); } tbody tr:last-child > * { border-bottom: 0; }
.number { width: 22%; min-width: 84px; font-variant-numeric: tabular-nums; }
details { margin: 6px 0; } summary { padding: 7px 14px; cursor: pointer; overflow-wrap: anywhere; } details ul { margin: 0; padding: 0 14px 10px 34px; font-size: 13.5px; overflow-wrap: anywhere; }
@media (max-width: 600px) { header, main { padding-inline: 14px; } .cards { grid-template-columns: repeat(2, 1fr); } th, td { padding-inline-end: 10px; } }
"""
