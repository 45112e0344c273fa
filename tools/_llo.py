"""The machine code of a TPU program: Mosaic's MLIR of each kernel, and the compiler's bundles.

A *bundle* is one VLIW instruction, issued in one cycle where nothing is waited for. Pure functions
over the compiler's texts, but for `mosaic` and `dump`.
"""

import base64
import dataclasses
import glob
import os
import pathlib
import re
import subprocess
import sys

# ---------------------------------------------------------------------------- Mosaic's MLIR


def mosaic(stablehlo: str) -> list[tuple[str, str]]:
    """(name, MLIR) of each kernel in the text of a lowered module."""
    found = []
    for line in stablehlo.splitlines():
        body = re.search(r"body\\22: \\22([A-Za-z0-9+/=]+)\\22", line)
        if "@tpu_custom_call" in line and body:
            name = re.search(r'kernel_name = "([^"]*)"', line)
            found.append((name[1] if name else "kernel", _decode(base64.b64decode(body[1]))))
    return found


def _decode(bytecode: bytes) -> str:
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _tpu_ext
    from jaxlib.mlir.passmanager import PassManager

    context = ir.Context()
    _tpu_ext.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        module = ir.Module.parse(bytecode)
        # From the stable form, which names every operation apart, to the dialects' own.
        PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        return str(module)


# --------------------------------------------------------------------------------- bundles

UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL")
UNITS += ("VSTORE", "VSTORE:SPILL", "SALU")
SHOWN = {"MXU": "MATMUL", "VALU": "VALU", "XLU": "XLU", "EUP": "EUP"}
SHOWN |= {"load": "VLOAD", "store": "VSTORE", "scalar": "SALU"}
PASSES = ".*(final_bundles|final_hlo-static-per-bundle-utilization).*"


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a program, or the whole of it.

    Attributes:
      depth: loops around it.
      first, last: addresses of its bundles.
      bundles: cycles of one iteration outside of inner loops, all branches counted.
      use: unit -> share of its slots that these bundles use.
      spills, fills: vector registers stored and loaded again for want of registers.
    """

    depth: int
    first: str
    last: str
    bundles: int
    use: dict[str, float]
    spills: int
    fills: int


@dataclasses.dataclass(frozen=True)
class Code:
    """The bundles of one operation: its name, how many there are, its loops, and the text."""

    name: str
    bundles: int
    loops: list[Loop]
    text: str


def dumping(folder: str, passes: str) -> dict[str, str]:
    """The environment of a process whose libtpu writes what these passes give to folder."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    flags += f" --xla_jf_dump_llo_pass_label_regex={passes}"
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    return dict(os.environ, LIBTPU_INIT_ARGS=f"{given} {flags}".strip())


def dump(argv, folder: str) -> None:
    """Runs a Python program with libtpu writing its bundles to folder.

    Raises:
      SystemExit: the program failed.
    """
    environment = dumping(folder, PASSES)
    done = subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])


def read(folder: str, names) -> list[Code]:
    """The code of the operations whose name begins with one of these."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*final_bundles.txt"))):
        match = re.match(r"\d+-(.*)-\d+-final_bundles\.txt$", os.path.basename(path))
        if not match or not match[1].startswith(tuple(names)) or match[1][:3] in ("<la", "TLP"):
            continue  # the last two are the program's own start and end
        pattern = f"*-{glob.escape(match[1])}-*final_hlo-static-per-bundle*"
        use = glob.glob(os.path.join(glob.escape(folder), pattern))
        text, slots = (pathlib.Path(p).read_text() for p in (path, *(use[:1] or [os.devnull])))
        found.append(parse(match[1], text, slots))
    return found


_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:\w\w:)?\s*:?\s*[> ]*\{", re.M)


def parse(name: str, bundles: str, utilization: str) -> Code:
    """Of the compiler's two texts: final_bundles, and the slots that each bundle uses."""
    addresses, branches, regions = [], [], {}
    for line in bundles.splitlines():
        if match := _BUNDLE.match(line):
            addresses.append(match[1])
        here = len(addresses) - 1
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            regions.setdefault(region, max(here, 0))
        branches += [(here, r) for r in re.findall(r"sbr\.\w+ [^;]*?target = \$region(\d+)", line)]
    count = len(addresses)
    # A branch to a region that began before it closes a loop.
    back = {(regions[r], i + 1) for i, r in branches if r in regions and regions[r] <= i}
    spans = sorted({(0, count), *back}, key=lambda s: (s[0], -s[1]))
    capacity, used = _slots(utilization, count)
    loops = [_loop(s, spans, addresses, capacity, used) for s in spans if count]
    return Code(name, count, loops, bundles)


def _slots(text: str, count: int):
    """(slots of each unit, slots that each bundle uses), in the order of UNITS."""
    rows = [list(map(int, x.split())) for x in text.splitlines() if re.match(r"^[\s\d]*\d\s*$", x)]
    none = [0] * len(UNITS)
    return (rows[0] if rows else [1] * len(UNITS)), (rows[1:] + [none] * count)[:count]


def _loop(span, spans, addresses, capacity, used) -> Loop:
    inner = [s for s in spans if s != span and span[0] <= s[0] and s[1] <= span[1]]
    own = [i for i in range(*span) if not any(a <= i < b for a, b in inner)]
    total = dict(zip(UNITS, (sum(used[i][u] for i in own) for u in range(len(UNITS))), strict=True))
    slots = dict(zip(UNITS, capacity, strict=True))
    return Loop(
        depth=sum(s != span and s[0] <= span[0] and span[1] <= s[1] for s in spans),
        first=addresses[span[0]],
        last=addresses[span[1] - 1],
        bundles=len(own),
        use={k: total[u] / max(1, slots[u] * len(own)) for k, u in SHOWN.items()},
        spills=total["VSTORE:SPILL"],
        fills=total["VLOAD:FILL"],
    )


def table(codes: list[Code]) -> str:
    """Loops of each program: cycles of an iteration and the shares of slots that are used."""
    units = "".join(f"{u:>8}" for u in SHOWN)
    lines = []
    for code in codes:
        lines += [f"{code.name}: {code.bundles} bundles"]
        lines.append(f"  {'loop':<24}{'cycles':>8}{units}{'spills':>8}{'fills':>8}")
        for loop in code.loops:
            where = f"{loop.first}-{loop.last}" if loop.depth else "outside of loops"
            use = "".join(f"{u:>8.0%}" for u in loop.use.values())
            label = "  " * max(0, loop.depth - 1) + where
            lines.append(f"  {label:<24}{loop.bundles:>8}{use}{loop.spills:>8}{loop.fills:>8}")
        lines.append("")
    lines.append("cycles: bundles of an iteration outside of inner loops, all branches counted and")
    lines.append("nothing waited for. The compiler's schedule; nothing was run.")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- instructions


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``to = op args``, if ``predicate``; otherwise ``to = old``."""

    op: str
    to: str
    args: tuple[str, ...]
    predicate: str | None
    old: str | None
    text: str


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One bundle: its scalar instructions, matmul issues, and the regions that start with it.

    An issue with float8 rows that are widened to bf16 has twice the rows, and counts twice.
    """

    address: str
    instructions: tuple[Instruction, ...]
    matmuls: int
    regions: tuple[str, ...]


_INSTRUCTION = re.compile(r"(%\w+) = ([a-z][\w.]*)\s*(.*)", re.S)
_PREDICATE = re.compile(r"\((!?%p\d+_p\d+)(?:,\s*(%\w+))?\)")
_ARGUMENT = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]|[^\s,]+")
# Of no influence on what runs: the vector unit's, waits, checks. Results for scalars are undefined.
_IGNORED = ("v", "spop", "shalt", "sfence", "dma.done")


def bundles_of(listing: str) -> list[Bundle]:
    """The bundles of a final_bundles listing."""
    found = []
    heads = [(m.start(), m.end(), m[1]) for m in _BUNDLE.finditer(listing)]
    ends = [start for start, _, _ in heads[1:]] + [len(listing)]
    for (_, begin, address), end in zip(heads, ends, strict=True):
        line = listing[begin:end]
        code = re.sub(r"/\*.*?\*/", "", line, flags=re.S).rsplit("}", 1)[0]
        instructions = tuple(filter(None, map(_instruction, code.split(";;"))))
        regions = tuple(re.findall(r"Start(?:/End empty)? region (\d+)", line))
        issues = re.findall(r"\bvmatmul\.(\S+)", code)
        matmuls = sum(2 if re.search(r"f8\w*\.bf16", x) else 1 for x in issues)
        found.append(Bundle(address, instructions, matmuls, regions))
    return found


def _instruction(text: str) -> Instruction | None:
    text = text.strip()
    match = _INSTRUCTION.match(text)
    if text and not match:
        raise ValueError(f"not an instruction: {text}")
    if not text or match[2].startswith(_IGNORED):
        return None
    to, op, rest = match.groups()
    predicate = _PREDICATE.search(rest)
    if predicate:
        rest = rest.replace(predicate[0], "")
    args = tuple(_ARGUMENT.findall(re.sub(r"\[\w+:\$\w+\]", "", rest)))  # not [thread:$0]
    if op.startswith("scalar_lea."):
        args = args[:2]  # not the allocation it is said to lie in
    return Instruction(op, to, args, *(predicate.groups() if predicate else (None, None)), text)
