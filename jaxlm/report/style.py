"""The style sheet of the report pages: light or dark like the reader's system, one column on a phone."""

CSS = """
:root { color-scheme: light dark; --back: #fff; --soft: #f4f5f7; --line: #d9dce1; --ink: #1b1e23; --dim: #5b626d;
  --kept: #2b6cb0; --gone: #d98c2b; --failed: #c0392b; --heat-ink: #d98c2b; --shade: #0004;
  --c0: #2b6cb0; --c1: #c0631f; --c2: #2f855a; --c3: #8a4fb0; --c4: #b83280; --c5: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --soft: #1e2127; --line: #353a43; --ink: #e6e8ec;
  --dim: #a0a7b3; --kept: #5a9bdc; --gone: #d9994a; --failed: #e57366; --heat-ink: #c9812b; --shade: #fff5;
  --c0: #63a4e6; --c1: #e39a5c; --c2: #5fc08d; --c3: #b78be0; --c4: #ec7fb8; --c5: #a3aab6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; margin: .5rem 0; } h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; } h3 { margin: 1.5rem 0 .25rem; }
p { max-width: 46rem; margin: .4rem 0; } a { color: var(--kept); } .dim { color: var(--dim); } .small { font-size: .8rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 1rem 0; padding: .6rem 0; border: solid var(--line);
  border-width: 1px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--soft); border-radius: .4rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.2; } .tile span { color: var(--dim); font-size: .85rem; }
/* Shadows at the edges behind which a table goes on; the two covers move with the table, and hide them at its ends. */
.scroll { overflow-x: auto; margin: .6rem 0; background:
  linear-gradient(to right, var(--back) 40%, transparent) left / 3rem 100% local no-repeat,
  linear-gradient(to left, var(--back) 40%, transparent) right / 3rem 100% local no-repeat,
  linear-gradient(to right, var(--shade), transparent) left / 1rem 100% no-repeat,
  linear-gradient(to left, var(--shade), transparent) right / 1rem 100% no-repeat; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  vertical-align: top; unicode-bidi: isolate; }
th { font-weight: 600; } thead th { color: var(--dim); font-weight: 500; }
tbody th, .text { text-align: left; } td.text { white-space: normal; min-width: 8rem; max-width: 40rem; }
td.text code { overflow-wrap: anywhere; }
tbody th { position: sticky; left: 0; background: var(--back); max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
.option { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.nowrap { white-space: nowrap; display: inline-block; }
.zero { color: var(--dim); opacity: .6; }
.heat { background: color-mix(in srgb, var(--heat-ink) calc(var(--heat) * .75), transparent); }
.bar { display: flex; height: .8rem; min-width: 7rem; background: var(--soft); border-radius: .2rem; overflow: hidden;
  margin-top: .3rem; }
.bar + .bar { margin-top: 1px; }
.bar span { display: block; min-width: 1px; } .bar .kept { background: var(--kept); } .bar .gone { background: var(--gone); }
.bar .failed { background: var(--failed); }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .3rem 0 .8rem; }
.key.kept { background: var(--kept); } .key.gone { background: var(--gone); } .key.failed { background: var(--failed); }
.columns { max-width: 40rem; font-size: .9rem; } .columns .row { display: grid; gap: .6rem;
  grid-template-columns: 7rem 1fr 6rem; } .columns .row span:last-child { font-variant-numeric: tabular-nums; }
.spark { width: 12rem; height: 1.6rem; fill: var(--kept); background: var(--soft); vertical-align: middle; }
.spark .median { fill: var(--gone); } td details { margin: 0; }
details { margin: .4rem 0; } details details { margin-left: 1rem; } summary { cursor: pointer; }
.example { border-left: 3px solid var(--line); padding: .1rem 0 .1rem .8rem; margin: .8rem 0; font-size: .9rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6rem; border-radius: .4rem;
  font: .8rem/1.45 ui-monospace, monospace; margin: .3rem 0; unicode-bidi: isolate; max-height: 24rem; overflow-y: auto; }
code { font: .85em ui-monospace, monospace; unicode-bidi: isolate; } .id { overflow-wrap: anywhere; }
figure { margin: 1rem 0; break-inside: avoid; } figcaption { font-size: .9rem; margin-bottom: .3rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 0 1.5rem; }
.plot { position: relative; padding: .4rem .8rem 1.6rem 3.6rem; }
.plot svg { display: block; width: 100%; height: 13rem; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; } .grid { stroke: var(--line); }
.dot { stroke-width: 6; stroke-linecap: round; }
.mark { stroke: var(--dim); stroke-dasharray: 2 3; } .line { stroke-width: 1.6; stroke-linejoin: round; }
.dotted { stroke-dasharray: 4 4; }
.along { font-size: .75rem; color: var(--dim); text-align: center; padding-left: 2.8rem; }
.unit { margin-left: .8rem; }
.ys, .xs { position: absolute; font-size: .75rem; color: var(--dim); font-variant-numeric: tabular-nums; }
.ys { left: 0; top: .4rem; bottom: 1.6rem; width: 3.2rem; }
.ys span { position: absolute; right: 0; transform: translateY(-50%); }
.xs { left: 3.6rem; right: .8rem; bottom: 0; height: 1.4rem; } .xs span { position: absolute; transform: translateX(-50%); }
path.c0 { stroke: var(--c0); } path.c1 { stroke: var(--c1); } path.c2 { stroke: var(--c2); } path.c3 { stroke: var(--c3); }
path.c4 { stroke: var(--c4); } path.c5 { stroke: var(--c5); }
.key.c0, .bar .c0 { background: var(--c0); } .key.c1, .bar .c1 { background: var(--c1); }
.key.c2, .bar .c2 { background: var(--c2); } .key.c3, .bar .c3 { background: var(--c3); }
.key.c4, .bar .c4 { background: var(--c4); } .key.c5, .bar .c5 { background: var(--c5); } .bar.wide { height: 1.2rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: .8rem; }
@media (max-width: 40rem) { body { padding: .7rem; } .columns .row { grid-template-columns: 6.5rem 1fr 4rem; }
  th, td { padding: .3rem .4rem; } tbody th { max-width: 8rem; } .bar { min-width: 3rem; }
  td.text:has(> .bar) { min-width: 3rem; } }
@media print { .scroll { overflow: visible; } table { font-size: .75rem; } pre { max-height: none; }
  h2, h3, figcaption { break-after: avoid; } summary { list-style: none; break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""
