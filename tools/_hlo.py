"""What runs over a buffer's rows, read from optimized HLO text or from a jaxpr.

Pure functions over text and jaxprs, shared by dump_hlo.py and its tests; no JAX is imported here.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

# Bits of an element, by HLO's name of the type.
BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
}

KINDS = {
    "reduce": ("reduce", "reduce-window", "argmax", "argmin", "cumsum", "cummax", "sort"),
    "clamp": ("clamp", "maximum", "minimum", "max", "min"),
    "multiply": ("multiply", "divide", "mul", "div", "reciprocal", "integer_pow", "square"),
    "convert": ("convert", "convert_element_type", "reduce-precision", "reduce_precision"),
    "select": ("select", "select_n"),
    "compare": ("compare", "and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge", "is-finite"),
    "abs, sign, round": ("abs", "sign", "round-nearest-even", "round", "floor", "negate", "neg"),
    "add, subtract": ("add", "subtract", "sub", "add_any"),
    "gather, slice": (
        *("gather", "scatter", "dynamic-slice", "dynamic-update-slice", "slice", "pad"),
        *("dynamic_slice", "dynamic_update_slice", "concatenate"),
    ),
    "copy, transpose": ("copy", "copy-start", "transpose"),
    "broadcast, iota": ("broadcast", "iota", "broadcast_in_dim"),
    "matmul": ("dot", "convolution", "ragged-dot", "dot_general", "ragged_dot_general"),
}
_KIND_OF = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes}

# They name, group or reinterpret values; whatever they call is looked at by itself.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "copy-done"),
    *("while", "call", "conditional", "optimization-barrier", "opt-barrier", "add-dependency"),
    *("async-start", "async-update", "async-done", "after-all", "partition-id", "replica-id"),
    *("stop_gradient", "squeeze", "expand_dims", "pcast", "bitcast_convert_type", "copy_p"),
}


def is_free(opcode: str) -> bool:
    """Whether it names, groups or reinterprets values, or only ends what another began."""
    return opcode in _FREE or opcode.endswith(("-done", "-update"))


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = 1
        for d in self.shape:
            size *= d
        bits = 8 if self.dtype.startswith("f8") else BITS.get(self.dtype, 0)
        return (size * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO; ``results`` has more than one array where the type is a tuple."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, *attributes) -> list[str]:
        """Names of the computations that it calls through these attributes."""
        names = []
        for attribute in attributes:
            for found in re.findall(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes):
                names += re.findall(r"[\w.\-]+", found)
        return names


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module: its computations, and the name of the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


@dataclasses.dataclass(frozen=True)
class RowOp:
    """An operation over a buffer's rows, outside our kernels."""

    kind: str
    opcode: str
    bytes: int  # of its largest array that has the rows
    where: str  # name of the instruction or fusion


@dataclasses.dataclass(frozen=True)
class Report:
    """What a program does outside the kernels.

    Attributes:
      fused: how many fused operations of ours it has, by name.
      row_ops: the operations over the buffer's rows outside of them.
      traffic: bytes that these read and write, each fusion's operands and results once; None where
        that is not known (a jaxpr).
    """

    fused: Counter
    row_ops: list[RowOp]
    traffic: int | None = None

    def narrow(self, rows: int) -> list[RowOp]:
        """The operations that have a number or two for each row, no features: routing, scales."""
        return [op for op in self.row_ops if op.bytes <= 8 * rows]

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """kind -> (how many, bytes of the arrays they run over), in KINDS' order."""
        out = {}
        for kind in (*KINDS, "other"):
            ops = [op for op in self.row_ops if op.kind == kind]
            if ops:
                out[kind] = len(ops), sum(op.bytes for op in ops)
        return out


# ---------------------------------------------------------------------------------- parsing HLO

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of an HLO type.

    >>> arrays("bf16[4096,7168]{1,0:T(8,128)(2,1)}")
    (Array(dtype='bf16', shape=(4096, 7168)),)
    """
    found = _ARRAY.findall(re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", text))
    return tuple(
        Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in found
        if dtype in BITS or dtype.startswith("f8")
    )


def parse_hlo(text: str) -> Module:
    """Parses the text of an optimized HLO module (``compiled.as_text()``).

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header.group(2), {})
            entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _LINE.match(line)):
            instruction = _parse_instruction(match, line[match.end() :])
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("not the text of an optimized HLO module: it has no ENTRY computation")
    return Module(computations, entry)


def _parse_instruction(match, rest: str) -> Instruction:
    """Of ``<type> <opcode>(<operands>), <attributes>``."""
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    results, rest = arrays(rest[:end]), rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    close = _closing("(" + rest)
    operands, attributes = rest[: close - 1], rest[close:]
    names = re.findall(r"%([\w.\-]+)", operands) or re.findall(r"[\w.\-]+", operands)
    return Instruction(
        name=match.group(2),
        opcode=opcode,
        results=results,
        operands=tuple(names),
        attributes=attributes,
        root=bool(match.group(1)),
    )


def _closing(text: str) -> int:
    """The index after the parenthesis that closes the one text begins with."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i + 1
    return len(text)


def runs_over_rows(array: Array, rows: int) -> bool:
    """Whether a dimension, or neighbouring ones together, are the buffer's rows."""
    for i in range(len(array.shape)):
        size = 1
        for d in array.shape[i:]:
            size *= d
            if size == rows:
                return True
    return False


def _row_op(opcode, where, touched, rows) -> RowOp | None:
    over = [a.bytes for a in touched if runs_over_rows(a, rows)]
    if is_free(opcode) or not over:
        return None
    return RowOp(_KIND_OF.get(opcode, "other"), opcode, max(over), where)


def report_of_hlo(text: str, rows: int) -> Report:
    """What an optimized HLO module does to a buffer of this many rows outside custom calls.

    Loops, branches, calls and fusions are looked into. A fused broadcast costs nothing and is left
    out unless it is what the fusion returns.
    """
    module = parse_hlo(text)
    fused, row_ops, traffic = Counter(), [], 0
    pending = [module.entry]
    for computation in pending:
        instructions = module.computations[computation]
        for op in instructions.values():
            called = op.called("body", "condition", "calls", "to_apply", "branch_computations")
            called += op.called("true_computation", "false_computation")
            touched = _touched(op, instructions)
            if op.opcode == "custom-call":
                target = re.search(r'custom_call_target="([^"]*)"', op.attributes)
                fused[target.group(1) if target else "custom-call"] += 1
            elif op.opcode == "fusion":
                inner = [r for c in called for r in _fused_row_ops(module, c, op.name, rows)]
                row_ops += inner
                traffic += sum(a.bytes for a in touched) if inner else 0
            elif op.opcode in ("while", "call", "conditional", "async-start"):
                pending += [c for c in called if c not in pending]
            elif (row_op := _row_op(op.opcode, op.name, touched, rows)) is not None:
                row_ops.append(row_op)
                traffic += sum(a.bytes for a in touched)
    return Report(fused, row_ops, traffic)


def _touched(op: Instruction, instructions) -> list[Array]:
    """The arrays that an instruction reads and writes."""
    read = [a for o in op.operands if o in instructions for a in instructions[o].results]
    return [*read, *op.results]


def _fused_row_ops(module: Module, computation: str, where: str, rows: int) -> Iterator[RowOp]:
    instructions = module.computations.get(computation, {})
    for op in instructions.values():
        if op.opcode == "fusion":
            for inner in op.called("calls"):
                yield from _fused_row_ops(module, inner, where, rows)
        elif op.root or op.opcode not in ("broadcast", "iota"):
            row_op = _row_op(op.opcode, where, _touched(op, instructions), rows)
            if row_op is not None:
                yield row_op


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of ours in an optimized HLO module, and the bytes of VMEM that it uses."""

    name: str
    instruction: str
    vmem: int


def kernels(text: str) -> list[Kernel]:
    """The tpu_custom_calls of an optimized HLO module, in the order of the text."""
    found = []
    for instructions in parse_hlo(text).computations.values():
        for op in instructions.values():
            name = kernel_name(op)
            if name is None:
                continue
            used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', op.attributes)
            sizes = re.findall(r'"memory_space":"1"[^}]*?"size":"(\d+)"', used[1] if used else "")
            vmem = max(map(int, sizes), default=0)
            found.append(Kernel(name, op.name, vmem))
    return found


def kernel_name(op: Instruction) -> str | None:
    """The name of a kernel's call, None for other instructions."""
    if op.opcode not in ("custom-call", "custom-call-start"):
        return None
    return op.name.partition(".")[0] if '"tpu_custom_call"' in op.attributes else None


COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """kind -> (how many, bytes of their results), of an optimized HLO module."""
    out = {}
    for instructions in parse_hlo(text).computations.values():
        for op in instructions.values():
            kind = op.opcode.removesuffix("-start")
            if kind not in COLLECTIVES or not op.results:
                continue
            # The result of a start holds the operands too: its last array is what arrives.
            arrived = op.results[-1:] if op.opcode.endswith("-start") else op.results
            count, size = out.get(kind, (0, 0))
            out[kind] = count + 1, size + sum(a.bytes for a in arrived)
    return out


# ------------------------------------------------------------------------------ reading a jaxpr


def report_of_jaxpr(jaxpr, rows: int, ours: str = "fp8moe_") -> Report:
    """The same of a jaxpr, as traced: before any dead code is removed."""
    fused, row_ops = Counter(), []
    pending = [jaxpr]
    while pending:
        for eqn in getattr(pending[-1], "jaxpr", pending.pop()).eqns:
            name = eqn.primitive.name
            inner = [j for value in eqn.params.values() for j in jaxprs(value)]
            if name.startswith(ours):
                fused[name] += 1
            elif inner and not name.startswith(("reduce", "scatter", "arg")):
                pending += inner
            else:
                row_ops += report_of_eqn(eqn, rows).row_ops
    return Report(fused, row_ops)


def report_of_eqn(eqn, rows: int) -> Report:
    """Of an equation without a jaxpr inside, which is none of ours."""
    name = eqn.primitive.name
    if name in ("broadcast_in_dim", "iota"):
        return Report(Counter(), [])
    touched = [array_of(v.aval) for v in (*eqn.invars, *eqn.outvars)]
    row_op = _row_op("reduce" if name.startswith("reduce_") else name, name, touched, rows)
    return Report(Counter(), [] if row_op is None else [row_op])


def jaxprs(value):
    if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from jaxprs(v)


_HLO_NAMES = {"bool": "pred", "bfloat16": "bf16"}


def array_of(aval) -> Array:
    name = getattr(getattr(aval, "dtype", None), "name", "")
    for long, short in (("float8_", "f8"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name not in _HLO_NAMES and name.startswith(long):
            name = short + name[len(long) :]
    return Array(_HLO_NAMES.get(name, name), tuple(getattr(aval, "shape", ())))
