"""dump_hlo.py --html: one page with the graph and the HLO of one or two programs, side by side.

Self-contained: no link, font, image or script from elsewhere, and a policy that forbids them.
"""

import dataclasses
import html
import json
import re

from tools import _graph, _hlo, _programs
from tools._summary import size


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the programs on the page.

    Attributes:
      name: what stands above it.
      nodes: the boxes of its graph.
      hlo: the text of its optimized HLO.
      marks: instruction -> "ours" or "dense", in that text.
    """

    name: str
    nodes: list[_graph.Node]
    hlo: str
    marks: dict[str, str]


def side(name: str, program, compiled, target: str) -> Side:
    import jax

    text = _programs.text_of(compiled)
    report = _hlo.report_of_hlo(text, program.rows)
    marks = {k.instruction: "ours" for k in _hlo.kernels(text)}
    if target == "cpu":
        nodes = _graph.of_jaxpr(jax.make_jaxpr(program.fn)(*program.args), program.rows)
    else:
        nodes = _graph.of_hlo(_hlo.parse_hlo(text), report, program.rows)
        marks |= {op.where: "dense" for op in _graph.wide_ops(report, program.rows)}
    return Side(name, nodes, text, marks)


# ------------------------------------------------------------------------------------- HLO


def clean(line: str) -> str:
    """A line of HLO without what nobody reads: metadata, the kernels' code, layouts' details."""
    for attribute in ("metadata", "backend_config", "frontend_attributes"):
        at = line.find(f", {attribute}={{")
        if at >= 0:
            line = line[:at] + line[_closing(line, line.index("{", at)) :]
    return line if len(line) < 1500 else line[:1500] + " ..."


def _closing(text: str, start: int) -> int:
    """The index after the brace that closes the one at start; braces in strings don't count."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[{}]').finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(text)


def _fold(prefix: str, shown: Side) -> str:
    """The HLO, each computation a part that folds; the entry's is first and open."""
    out, lines, title = [], [], ""
    for line in shown.hlo.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            title, lines = clean(line.removesuffix("{").strip()), []
        elif line.startswith("}"):
            opened = " open" if title.startswith("ENTRY") else ""
            head = html.escape(title if len(title) < 200 else title[:200] + " ...")
            body = f"<summary>{head}</summary><pre>{''.join(lines)}</pre>"
            out.insert(0 if opened else len(out), f"<details{opened}>{body}</details>")
        elif match := re.match(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", line):
            mark = shown.marks.get(match[1], "")
            name = html.escape(f"{prefix}:{match[1]}", quote=True)
            lines.append(f'<span class="l {mark}" id="{name}">{html.escape(clean(line))}</span>\n')
    return "\n".join(out)


# ----------------------------------------------------------------------------------- graph


def _svg(prefix: str, nodes: list[_graph.Node]) -> str:
    w, h = _graph.WIDTH, _graph.HEIGHT
    right, bottom = max(n.x for n in nodes) + w, max(n.y for n in nodes) + h
    at = {n.name: n for n in nodes}
    paths, boxes = [], []
    for n in nodes:
        for i in n.inputs:
            a, b = (at[i].x + w / 2, at[i].y + h), (n.x + w / 2, n.y)
            bend = max(12, (b[1] - a[1]) / 2)
            curve = f"M{a[0]:.0f} {a[1]:.0f}C{a[0]:.0f} {a[1] + bend:.0f} "
            curve += f"{b[0]:.0f} {b[1] - bend:.0f} {b[0]:.0f} {b[1]:.0f}"
            ends = f'data-from="{_id(prefix, i)}" data-to="{_id(prefix, n.name)}"'
            paths.append(f'<path class="edge" {ends} d="{curve}"/>')
        boxes.append(_box(prefix, n))
    size_ = f'width="{right + 20:.0f}" height="{bottom + 20:.0f}"'
    box = f'viewBox="-10 -10 {right + 20:.0f} {bottom + 20:.0f}"'
    return f"<svg {size_} {box}>{''.join(paths)}{''.join(boxes)}</svg>"


def _box(prefix: str, n: _graph.Node) -> str:
    lines = (_short(n.label, 26), _short(_arrays(n), 31))
    return (
        f'<g class="node {n.kind}" data-node="{_id(prefix, n.name)}" tabindex="0" role="button"'
        f' transform="translate({n.x:.0f} {n.y:.0f})">'
        f"<title>{html.escape(n.label)}: {size(n.bytes)}</title>"
        f'<rect width="{_graph.WIDTH}" height="{_graph.HEIGHT}" rx="6"/>'
        f'<text x="10" y="20" class="label">{html.escape(lines[0])}</text>'
        f'<text x="10" y="37" class="shape">{html.escape(lines[1])}</text></g>'
    )


def _id(prefix: str, name: str) -> str:
    return html.escape(f"{prefix}:{name}", quote=True)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _arrays(n: _graph.Node) -> str:
    largest = max(n.results, key=lambda a: a.bytes, default=None)
    if largest is None:
        return ""
    shape = ",".join(map(str, largest.shape))
    more = f" +{len(n.results) - 1}" if len(n.results) > 1 else ""
    return f"{largest.dtype}[{shape}]{more} {size(n.bytes)}"


def _details(prefix: str, shown: Side) -> dict:
    """What the panel says of each box."""
    words = {
        "ours": "one of our operations, a single kernel",
        "dense": "runs over the buffer's static rows outside our kernels",
        "collective": "moves data between devices",
    }
    out = {}
    for n in shown.nodes:
        arrays = [f"{a.dtype}[{','.join(map(str, a.shape))}] {size(a.bytes)}" for a in n.results]
        over = ", ".join(f"{kind} {count}" for kind, count in n.over_rows.items())
        out[f"{prefix}:{n.name}"] = {
            "name": n.name,
            "what": n.label + (f": {words[n.kind]}" if n.kind in words else ""),
            "results": arrays[:8] + (["..."] if len(arrays) > 8 else []),
            "over the buffer's rows": over,
            "reads": n.inputs,
        }
    return out


# ------------------------------------------------------------------------------------ page


def page(title: str, table: str, sides: list[Side]) -> str:
    """The HTML text. One or two sides."""
    columns, details = [], {}
    for i, shown in enumerate(sides):
        prefix = f"s{i}"
        details |= _details(prefix, shown)
        count = lambda kind, shown=shown: sum(n.kind == kind for n in shown.nodes)
        columns.append(
            f'<section class="side" data-side="{html.escape(shown.name)}">'
            f"<h2>{html.escape(shown.name)}</h2><p class='counts'>"
            f"<b class='ours'>{count('ours')}</b> of our operations, <b class='dense'>"
            f"{count('dense')}</b> dense over the buffer's rows, {len(shown.nodes)} boxes"
            '<span class="zoom"><button data-zoom="0.8">-</button>'
            '<button data-zoom="1.25">+</button><button data-zoom="fit">fit</button></span></p>'
            f'<div class="graph">{_svg(prefix, shown.nodes)}</div>'
            f'<div class="panel" aria-live="polite">Click a box.</div>'
            f'<div class="hlo"><h3>optimized HLO</h3>{_fold(prefix, shown)}</div></section>'
        )
    data = json.dumps(details).replace("<", "\\u003c")
    legend = "".join(
        f'<span class="key {kind}">{text}</span>'
        for kind, text in (
            ("ours", "our operations"),
            ("dense", "dense, over the buffer's rows"),
            ("collective", "collectives"),
            ("loop", "loops"),
            ("input", "arguments, result"),
            ("other", f"others from {size(_graph.VISIBLE_BYTES)}"),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><div class='legend'>{legend}</div>"
        "<details class='table'><summary>summary</summary>"
        f"<pre>{html.escape(table)}</pre></details>"
        f'<main class="n{len(sides)}">{"".join(columns)}</main>'
        f'<script type="application/json" id="details">{data}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STYLE = """
body{font:14px system-ui,sans-serif;margin:16px;color:#1d2733;background:#fff}
h1{font-size:18px;margin:0 0 8px}h2{font-size:16px;margin:0}h3{font-size:14px;margin:12px 0 4px}
main{display:grid;gap:16px}main.n2{grid-template-columns:1fr 1fr}
.side{min-width:0;border:1px solid #d5dbe3;border-radius:8px;padding:10px}
.counts{margin:4px 0 8px;color:#51606f}.counts b.ours{color:#0b7a5b}.counts b.dense{color:#c0431c}
.zoom{float:right}.zoom button{margin-left:4px;min-width:28px;cursor:pointer}
.graph{height:56vh;overflow:auto;border:1px solid #e3e8ee;border-radius:6px;background:#fafbfc}
.edge{fill:none;stroke:#b6c0cb;stroke-width:1.2}.edge.near{stroke:#1d2733;stroke-width:2.2}
.node{cursor:pointer;outline:none}
.node rect{fill:#fff;stroke:#8896a5;stroke-width:1.2}
.node text{fill:#1d2733}.node .label{font-size:13px;font-weight:600}
.node .shape{font-size:11px;fill:#51606f;font-family:monospace}
.node.ours rect{fill:#c9f0e1;stroke:#0b7a5b;stroke-width:2}
.node.dense rect{fill:#ffd9cc;stroke:#c0431c;stroke-width:2}
.node.collective rect{fill:#d6e4ff;stroke:#2456b8;stroke-width:2}
.node.loop rect{fill:#efe6ff;stroke:#6b46b8}
.node.input rect,.node.output rect{fill:#eceff2;stroke:#b6c0cb}
.node:focus-visible rect,.node.picked rect{stroke:#1d2733;stroke-width:3.5}
.legend{margin-bottom:8px}.key{display:inline-block;border:2px solid #8896a5;border-radius:5px;
padding:1px 8px;margin-right:8px;font-size:12px}
.key.ours{background:#c9f0e1;border-color:#0b7a5b}.key.dense{background:#ffd9cc;border-color:#c0431c}
.key.collective{background:#d6e4ff;border-color:#2456b8}
.key.loop{background:#efe6ff;border-color:#6b46b8}
.key.input{background:#eceff2;border-color:#b6c0cb}
.panel{min-height:84px;max-height:180px;overflow:auto;margin-top:8px;padding:8px;
background:#f4f6f8;border-radius:6px;font-size:13px;overflow-wrap:anywhere}
.panel b{margin-right:6px}.panel a{color:#2456b8;cursor:pointer;margin-right:8px}
.table pre{overflow:auto;font-size:12px}
.hlo{max-height:60vh;overflow:auto;font-size:12px}.hlo pre{margin:2px 0 6px 12px}
.hlo summary{cursor:pointer;font-family:monospace}
.l{display:inline-block;min-width:100%}.l.ours{background:#c9f0e1}.l.dense{background:#ffd9cc}
.l.picked{background:#ffeb99}
"""

_SCRIPT = """
const details = JSON.parse(document.getElementById("details").textContent);
const nodeOf = id => document.querySelector(`[data-node="${CSS.escape(id)}"]`);
function line(panel, name, value) {
  if (!value.length) return;
  const p = document.createElement("div"), b = document.createElement("b");
  b.textContent = name; p.append(b, ...[].concat(value)); panel.append(p);
}
function pick(id, scroll) {
  const side = nodeOf(id).closest(".side"), panel = side.querySelector(".panel");
  side.querySelectorAll(".picked").forEach(e => e.classList.remove("picked"));
  side.querySelectorAll(".edge").forEach(e => e.classList.toggle("near",
    e.dataset.from === id || e.dataset.to === id));
  nodeOf(id).classList.add("picked");
  if (scroll) nodeOf(id).scrollIntoView({block: "nearest", inline: "nearest"});
  const d = details[id];
  panel.replaceChildren();
  line(panel, d.name, d.what);
  line(panel, "makes", d.results.join("; "));
  line(panel, "over the buffer's rows", d["over the buffer's rows"]);
  line(panel, "reads", d.reads.map(name => {
    const a = document.createElement("a"); a.textContent = name;
    a.onclick = () => pick(id.split(":")[0] + ":" + name, true); return a;
  }));
  const row = document.getElementById(id);
  if (!row) return;
  row.classList.add("picked");
  row.closest("details").open = true;
  const box = side.querySelector(".hlo");
  box.scrollTop += row.getBoundingClientRect().top - box.getBoundingClientRect().top - 60;
}
document.querySelectorAll(".node").forEach(n => {
  n.addEventListener("click", () => pick(n.dataset.node));
  n.addEventListener("keydown", e => { if (e.key === "Enter") pick(n.dataset.node); });
});
function zoom(side, by) {
  const svg = side.querySelector("svg"), graph = side.querySelector(".graph");
  const box = svg.viewBox.baseVal, now = svg.width.baseVal.value;
  const width = by === "fit" ? Math.min(box.width, graph.clientWidth - 4) : now * Number(by);
  svg.setAttribute("width", width);
  svg.setAttribute("height", width * box.height / box.width);
}
document.querySelectorAll("[data-zoom]").forEach(b =>
  b.addEventListener("click", () => zoom(b.closest(".side"), b.dataset.zoom)));
document.querySelectorAll(".side").forEach(side => {
  const graph = side.querySelector(".graph"), svg = side.querySelector("svg");
  if (svg.width.baseVal.value < 2 * graph.clientWidth) zoom(side, "fit");
  graph.scrollLeft = (svg.width.baseVal.value - graph.clientWidth) / 2;
});
const asked = decodeURIComponent(location.hash.replace("#pick=", ""));
if (details[asked]) pick(asked, true);
"""
