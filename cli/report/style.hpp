// The look of the report: light and dark, screen, phone and paper. Series colours are those of Okabe and Ito (2008), distinguishable with
// any common colour blindness, lightened for the dark page where they would be too dim.
#pragma once

#include <string_view>

namespace nibble::cli {

inline constexpr std::string_view kReportStyle = R"css(
:root { color-scheme: light dark; --page: #fff; --text: #1b1d21; --quiet: #62666e; --rule: #e1e3e7; --soft: #f4f5f7;
  --bad: #b3261e; --s0: #0072b2; --s1: #e08a00; --s2: #009e73; --s3: #b65a92; --s4: #3aa0dd; --s5: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --page: #15171b; --text: #e4e6ea; --quiet: #9aa0aa; --rule: #30343b;
  --soft: #1d2025; --bad: #ff8a80; --s0: #4aa8e8; --s1: #f0a830; --s2: #2fc498; --s3: #d98bbd; --s4: #8cd0f5; --s5: #ff8a4c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 1040px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .35rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 3rem 0 .25rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
p { margin: .25rem 0 1rem; max-width: 52rem; }
.quiet, .sub, figcaption, dd { color: var(--quiet); }
.quiet, dd { margin: 0; }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 1.25rem 2rem; margin: 2rem 0 0; }
.headline div { border-top: 2px solid var(--text); padding-top: .5rem; }
.headline b { display: block; font-size: 1.9rem; font-weight: 600; line-height: 1.2; letter-spacing: -.02em; }
.headline .bad { color: var(--bad); }
.headline span { display: block; }
.headline .sub { font-size: .85em; overflow-wrap: anywhere; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: 1rem 0 0; }
dl.facts dt { color: var(--quiet); } dl.facts dd { color: var(--text); overflow-wrap: anywhere; }
dl.terms dt { font-weight: 600; margin-top: .75rem; } dl.terms dd { max-width: 46rem; }
.wide { overflow-x: auto; } .wide svg { min-width: 640px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums;
  fill: var(--text); }
svg text.tick, svg text.axis { fill: var(--quiet); }
svg text.rooftext { font-weight: 600; fill: var(--quiet); }
.grid { stroke: var(--rule); } .roof { fill: none; stroke: var(--text); stroke-width: 1.5; }
.whisker { stroke: var(--text); } .track { fill: var(--soft); } .limit { stroke: var(--bad); stroke-width: 1.5; }
.stem { stroke: var(--s0); stroke-opacity: .45; } .trend { fill: none; stroke: var(--s0); stroke-opacity: .45; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); } .s4 { fill: var(--s4); }
.s5 { fill: var(--s5); }
.mark { fill-opacity: .85; stroke: var(--page); stroke-width: .75; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .75rem 0; font-size: .85em; }
.legend svg { display: inline-block; width: 12px; height: 12px; vertical-align: -1px; }
.panels + p { margin: .75rem 0 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; } figcaption { font-size: .85em; } figcaption b { color: var(--text); font-weight: 600; }
.scroll { overflow: auto; max-height: 85vh; border-bottom: 1px solid var(--rule); width: fit-content; min-width: 100%;
  max-width: calc(100vw - 2.5rem); position: relative; left: 50%; transform: translateX(-50%); }
table { border-collapse: collapse; font-size: .85em; width: 100%; }
th, td { padding: .35rem .55rem; text-align: right; white-space: nowrap; vertical-align: top; border-top: 1px solid var(--rule); }
th { position: sticky; top: 0; background: var(--page); box-shadow: 0 1px var(--text); border: 0; font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.scroll td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
.left { text-align: left; }
.unit, td .sub { display: block; font-weight: 400; font-size: .92em; color: var(--quiet); }
.bad { color: var(--bad); } .warning { color: var(--s5); }
ul.notes { list-style: none; padding: 0; } ul.notes li { margin: .5rem 0; max-width: 60rem; } ul.notes b { margin-right: .35rem; }
details { color: var(--quiet); font-size: .85em; }
@media (max-width: 600px) { body { padding-top: 1.5rem; } dl.facts { grid-template-columns: 1fr; }
  dl.facts dd { margin-bottom: .4rem; } }
@media print { @page { margin: 14mm; } body { padding: 0; max-width: none; font-size: 11px; }
  .scroll, .wide { max-height: none; max-width: none; overflow: visible; left: 0; transform: none; }
  .wide svg { min-width: 0; } table { font-size: 8px; } th { position: static; } th, td { padding: .2rem .35rem; }
  figure, .wide, tr { break-inside: avoid; } h2 { break-after: avoid; } }
)css";

}  // namespace nibble::cli
