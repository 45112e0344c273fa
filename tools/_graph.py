"""The graph of a program, for dump_hlo.py --html: boxes, what they read, and where they stand.

From optimized HLO on a TPU, where our operations are kernels; from the jaxpr on a CPU, where they
are one equation each.
"""

import dataclasses
import re
from collections import Counter

from tools import _hlo

KINDS = ("ours", "dense", "collective", "loop", "input", "output", "other")
VISIBLE_BYTES = 1 << 20  # smaller results are left out, and edges lead through them
WIDTH, HEIGHT, GAP_X, GAP_Y = 224, 48, 18, 34


@dataclasses.dataclass
class Node:
    """A box.

    Attributes:
      name: of the instruction or equation.
      label: what the box says.
      kind: one of KINDS.
      results: the arrays that it makes.
      inputs: names of the nodes that it reads, through those that are not shown.
      over_rows: kind of operation -> how many it has over the buffer's rows, if it is "dense".
      x, y: its upper left corner.
    """

    name: str
    label: str
    kind: str
    results: tuple[_hlo.Array, ...]
    inputs: list[str]
    over_rows: Counter = dataclasses.field(default_factory=Counter)
    x: float = 0
    y: float = 0

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.results)

    @property
    def shown(self) -> bool:
        return self.kind != "other" or self.bytes >= VISIBLE_BYTES


# --------------------------------------------------------------------------- from optimized HLO


def of_hlo(module: _hlo.Module, report: _hlo.Report, rows: int) -> list[Node]:
    """The entry computation's graph; what runs in loops and branches is in their box."""
    wide = wide_ops(report, rows)
    entry = module.computations[module.entry]
    inside = lambda op: reachable(module, op)
    nodes = []
    for op in entry.values():
        over = Counter(o.kind for o in wide if o.where == op.name)
        for name in inside(op) if op.opcode in _CALLS else ():
            over += Counter(o.kind for o in wide if o.where in module.computations.get(name, {}))
        kind, label = _hlo_kind(op, module, over)
        nodes.append(Node(op.name, label, kind, op.results, list(op.operands), over))
    return shown(nodes)


_CALLS = ("while", "call", "conditional", "async-start")


def wide_ops(report: _hlo.Report, rows: int) -> list[_hlo.RowOp]:
    """The operations over the buffer's rows that have features: not a number or two a row."""
    narrow = {id(op) for op in report.narrow(rows)}
    return [op for op in report.row_ops if id(op) not in narrow]


def reachable(module: _hlo.Module, op: _hlo.Instruction) -> list[str]:
    """Names of the computations that an instruction runs."""
    attributes = ("body", "condition", "calls", "branch_computations")
    attributes += ("true_computation", "false_computation")
    found = op.called(*attributes)
    for name in found:
        for inner in module.computations.get(name, {}).values():
            found += [c for c in inner.called(*attributes) if c not in found]
    return found


def _hlo_kind(op, module, over) -> tuple[str, str]:
    kernel = _hlo.kernel_name(op)
    for name in reachable(module, op) if op.opcode in _CALLS else ():
        kernel = kernel or next(
            filter(None, map(_hlo.kernel_name, module.computations.get(name, {}).values())), None
        )
    if kernel is not None:
        return "ours", kernel
    if op.opcode == "parameter":
        return "input", re.sub(r"_?\.\d+$", "", op.name)
    if over:
        return "dense", ", ".join(over)
    if op.opcode.removesuffix("-start") in _hlo.COLLECTIVES:
        return "collective", op.opcode.removesuffix("-start")
    if op.opcode in ("while", "conditional"):
        return "loop", op.opcode
    if op.opcode in _THROUGH or op.opcode.endswith(("-done", "-update")):
        return "through", op.opcode
    if op.root:
        return "output", "result"
    return "other", op.name.partition(".")[0] if op.opcode == "fusion" else op.opcode


_THROUGH = ("bitcast", "get-tuple-element", "constant", "reshape", "add-dependency")
_THROUGH += ("after-all", "opt-barrier", "partition-id", "replica-id", "iota", "tuple")


# -------------------------------------------------------------------------------- from a jaxpr


def of_jaxpr(closed, rows: int) -> list[Node]:
    """Calls are followed, loops are one box; names are those of the equations, numbered."""
    nodes, names = [], {}
    inner = closed.jaxpr
    for i, v in enumerate(inner.invars):
        names[v] = f"argument.{i}"
        nodes.append(Node(names[v], f"argument {i}", "input", (_hlo.array_of(v.aval),), []))
    _walk(inner, names, nodes, rows)
    read = [names[v] for v in inner.outvars if v in names] if inner.outvars else []
    results = tuple(_hlo.array_of(v.aval) for v in inner.outvars)
    nodes.append(Node("result", "result", "output", results, read))
    return shown(_needed(nodes))


def _needed(nodes: list[Node]) -> list[Node]:
    """Those that the last one reads, however indirectly: a jaxpr has dead equations."""
    needed = {nodes[-1].name}
    for n in reversed(nodes):
        if n.name in needed:
            needed.update(n.inputs)
    return [n for n in nodes if n.name in needed]


def _walk(jaxpr, names, nodes, rows) -> None:
    get = lambda v: names.get(v) if not hasattr(v, "val") else None
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        bodies = [j for value in eqn.params.values() for j in _hlo.jaxprs(value)]
        reads = [n for n in map(get, eqn.invars) if n]
        body = getattr(bodies[0], "jaxpr", bodies[0]) if bodies else None
        loops = name in ("while", "scan", "cond")
        if body is not None and not name.startswith(("fp8moe_", "reduce", "scatter", "arg")):
            same = len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)
            if same and not loops:
                for inside, outside in zip(body.invars, eqn.invars, strict=True):
                    if get(outside):
                        names[inside] = get(outside)
                _walk(body, names, nodes, rows)
                for inside, outside in zip(body.outvars, eqn.outvars, strict=True):
                    if get(inside):
                        names[outside] = get(inside)
                continue
        nodes.append(_equation(eqn, name, bodies, reads, len(nodes), rows))
        names.update(dict.fromkeys(eqn.outvars, nodes[-1].name))


def _equation(eqn, name, bodies, reads, number, rows) -> Node:
    results = tuple(_hlo.array_of(v.aval) for v in eqn.outvars)
    ours = name.startswith("fp8moe_")
    over = Counter()
    if not ours:
        reports = [_hlo.report_of_jaxpr(b, rows) for b in bodies] or [_hlo.report_of_eqn(eqn, rows)]
        over = Counter(op.kind for r in reports for op in wide_ops(r, rows))
    loop = "loop" if name in ("while", "scan", "cond") else "other"
    collective = "collective" if name in _JAX_COLLECTIVES else loop
    kind = "ours" if ours else "dense" if over else collective
    kind = "through" if kind == "other" and _hlo.is_free(name) else kind
    return Node(f"{name}.{number}", name, kind, results, reads, over)


_JAX_COLLECTIVES = ("all_gather", "psum", "psum_invariant", "psum2", "reduce_scatter", "all_to_all")
_JAX_COLLECTIVES += ("ppermute", "all_gather_invariant")


# ------------------------------------------------------------------------------- what is shown


def shown(nodes: list[Node]) -> list[Node]:
    """The nodes that are shown, reading from each other through those that are not."""
    by_name = {n.name: n for n in nodes}
    memo = {}

    def sources(name):
        node = by_name.get(name)
        if node is None:
            return []
        if node.shown and node.kind != "through":
            return [name]
        if name not in memo:
            memo[name] = []  # a cycle can't be, but must not hang
            found = [s for i in node.inputs for s in sources(i)]
            memo[name] = list(dict.fromkeys(found))
        return memo[name]

    kept = [n for n in nodes if n.shown and n.kind != "through"]
    for node in kept:
        node.inputs = list(dict.fromkeys(s for i in node.inputs for s in sources(i)))
    read = {i for n in kept for i in n.inputs}
    return place([n for n in kept if n.kind != "input" or n.name in read])


def place(nodes: list[Node]) -> list[Node]:
    """Sets x and y: a layer below everything that is read, inputs just above their first reader."""
    by_name = {n.name: n for n in nodes}
    layer = {}
    for n in nodes:  # in the order of the program: what is read stands before
        layer[n.name] = 1 + max((layer.get(i, 0) for i in n.inputs), default=-1)
    for n in nodes:
        if n.kind == "input":
            readers = [layer[r.name] for r in nodes if n.name in r.inputs]
            layer[n.name] = max(0, min(readers, default=1) - 1)
    layers = [[n for n in nodes if layer[n.name] == i] for i in range(max(layer.values()) + 1)]
    widest = max(map(len, layers)) * (WIDTH + GAP_X)
    middle = {}
    for depth, row in enumerate(layers):

        def wish(n):
            above = [middle[i] for i in by_name[n.name].inputs if i in middle]
            return sum(above) / len(above) if above else widest / 2

        row.sort(key=wish)
        left = (widest - len(row) * (WIDTH + GAP_X)) / 2
        for i, n in enumerate(row):
            n.x, n.y = left + i * (WIDTH + GAP_X), depth * (HEIGHT + GAP_Y)
            middle[n.name] = n.x + WIDTH / 2
    return nodes
