"""Follows a compiled TPU kernel through a call: how often each of its bundles runs.

The compiler's listing (final_bundles) is the program that users run, with every operand under a
name that is assigned once. What its scalar unit computes, from the operands in scalar memory (for a
grouped matmul: tables made from the group sizes), decides which blocks of bundles run and how
often. So it is enough to execute the scalar instructions:

    run = follow(text, {0: visits, 1: table})
    run.cycles, run.bytes

What a name holds may be undefined (None): the compiler computes ahead of the predicates that tell
whether a value is needed. Where an undefined one would decide something, that is an error.

- All instructions of a bundle read what was there before it, but for a phi, which comes first: the
  bundle's others see its new value. Its operands are in the order of the places it is reached
  from: the bundle before it and the branches to it.
- A pointer made of a number (int_to_ptr) is another name of it, also in the number's own bundle.
- A predicated instruction that does not run gives its name the old value written beside the
  predicate, ``(%p0_p1, %s2_s3)``; without one, the name is undefined. Stores and copies may be
  predicated too, and have undefined addresses where they do not run.
- A branch is taken after the six bundles that follow it. Where the last of them are empty the
  listing has one of them at most: so it is taken before another branch or a region's start, too.
- A copy's size is in granules of 32 bytes: what a pipelined kernel copies is its blocks, exactly.
- Where a device has two cores (v5p), it is the first one that is followed.
"""

import dataclasses
import operator
import re

from tools._llo import Bundle, Instruction, bundles_of

DELAY = 6  # bundles after a branch
GRANULE = 32  # bytes, the unit of a copy's size
# An issue holds one of the two MXUs for eight cycles, one of the four of v5p and v5e for sixteen.
MXU_CYCLES = 4
_CORE = re.compile(r"sld \[smem:\[(#allocation\d+)\]\] /\* megacore core id")
_WORD = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bundles of one region that run equally often: the first, their number, how often."""

    first: int
    bundles: int
    mxu: int  # cycles of the MXU for the products
    times: int

    @property
    def cycles(self) -> int:
        return max(self.bundles, self.mxu) * self.times


@dataclasses.dataclass(frozen=True)
class Run:
    """What a call executes.

    Attributes:
      bundles: of the program.
      executed: how often each of them.
      bytes: moved between HBM and VMEM by the copies that were started.
    """

    bundles: list[Bundle]
    executed: list[int]
    bytes: int

    def pieces(self) -> list[Piece]:
        """The straight pieces of the program, in its order."""
        out, start = [], 0
        for i in range(1, len(self.bundles) + 1):
            ends = i == len(self.bundles) or self.bundles[i].regions
            if ends or self.executed[i] != self.executed[start]:
                mxu = MXU_CYCLES * sum(b.matmuls for b in self.bundles[start:i])
                out.append(Piece(start, i - start, mxu, self.executed[start]))
                start = i
        return out

    @property
    def cycles(self) -> int:
        """The executed bundles, but every piece takes at least the MXU's time for its products."""
        return sum(piece.cycles for piece in self.pieces())

    @property
    def mxu(self) -> int:
        """Cycles that the MXU is at work."""
        return sum(piece.mxu * piece.times for piece in self.pieces())


def follow(listing: str, operands: dict, limit: int = 10**6) -> Run:
    """Executes the scalar part of a listing.

    Args:
      listing: text of the compiler's final_bundles file of one kernel.
      operands: index -> int, or a sequence of int32 that the kernel copies to scalar memory (or has
        in a register, if it is one). Other operands are arrays, of which only the address is known.
      limit: a bundle that runs more often is taken to run forever.

    Raises:
      ValueError: an instruction is not known, or an undefined value decides something.
    """
    core = _CORE.search(listing)
    return _Machine(bundles_of(listing), operands, core and core[1]).run(limit)


_COMPUTE = {
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "smulhi.u32": lambda x, y: (x * y) >> 32,
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "sshll.u32": operator.lshift,
    "sshrl.u32": operator.rshift,
    "sshra.s32": lambda x, y: _signed(x) >> y,
    "pand": operator.and_,
    "por": operator.or_,
    "pxor": operator.xor,
    "pnand": lambda x, y: 1 - (x & y),
    "pnor": lambda x, y: 1 - (x | y),
    "pneg": lambda x: 1 - x,
    "scalar_lea": operator.add,
    "smov.u32": lambda x: x,
    "pmov": lambda x: x,
}
# With one operand of the first value the result is the second, whatever the other operand is.
_DECIDES = {"pand": (0, 0), "pnand": (0, 1), "por": (1, 1), "pnor": (1, 0)}


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


class _Machine:
    def __init__(self, bundles, operands, core):
        """core: the allocation that has the number of the core, if there is one."""
        self.bundles, self.operands = bundles, operands
        self.names, self.memory, self.addresses, self.tables = {}, {}, {}, {}
        if core:
            self.memory[self.address(core)] = 0
        self.bytes = 0
        self.starts = {}
        for i, bundle in enumerate(bundles):
            for region in bundle.regions:
                self.starts.setdefault(region, i)
        # Of each bundle with a branch, the bundle it leads to.
        self.branches = {
            i: self.starts.get(x.args[-1].removeprefix("$region"))
            for i, bundle in enumerate(bundles)
            for x in bundle.instructions
            if x.op.startswith("sbr.")
        }

    def run(self, limit) -> Run:
        executed = [0] * len(self.bundles)
        here, origin, branch = 0, -1, None
        while here < len(self.bundles):
            bundle = self.bundles[here]
            if branch and (here > branch[0] + DELAY or bundle.regions or here in self.branches):
                (origin, here), branch = branch, None
                continue
            executed[here] += 1
            if executed[here] > limit:
                raise ValueError(f"bundle {bundle.address} has run {limit} times")
            try:
                target = self.step(here, origin) if bundle.instructions else None
            except ValueError as e:
                raise ValueError(f"bundle {bundle.address}: {e}") from e
            if target is not None:
                branch = here, target
            here, origin = here + 1, here
        return Run(self.bundles, executed, self.bytes)

    def step(self, here: int, origin: int):
        """Executes a bundle, after another one; the bundle to which it branches, or None."""
        instructions = self.bundles[here].instructions
        phis = [x for x in instructions if x.op == "sphi"]
        if phis:
            ways = sorted([here - 1, *(i for i, to in self.branches.items() if to == here)])
            if any(len(x.args) != len(ways) for x in phis):
                raise ValueError(f"{len(ways)} ways to {phis[0].text}")
            way = ways.index(origin)
            self.names.update([(x.to, self.names.get(x.args[way])) for x in phis])
        new, stores, pointers, target = {}, {}, {}, None
        for x in instructions:
            if x.op == "sphi":
                continue
            acts = x.op.startswith(("sbr.", "dma."))
            runs = x.predicate is None or (self.defined if acts else self.value)(x.predicate)
            if not runs:
                if x.op == "sst":
                    if runs is None:  # whether it is stored is not known
                        stores[self.defined(x.args[0])] = None
                elif not acts:
                    new[x.to] = None if runs is None else self.names.get(x.old)
            elif x.op == "sbr.rel":
                target = self.branches[here]
                if target is None:
                    raise ValueError(f"the listing has no start of the target: {x.text}")
            elif x.op == "sst":
                stores[self.defined(x.args[0])] = self.value(x.args[1])
            elif x.op.startswith("dma."):
                self.copy(x)
            elif x.op.startswith("int_to_ptr."):
                pointers[x.to] = x.args[0]
            else:
                new[x.to] = self.compute(x)
        self.names |= new
        self.names |= {to: self.value(arg) for to, arg in pointers.items()}
        self.memory |= stores
        return target

    def copy(self, x: Instruction) -> None:
        source, size, to = x.args[:3]
        if x.op in ("dma.hbm_to_smem", "dma.vmem_to_smem"):
            to = self.defined(to)
            for i, word in enumerate(self.tables.get(self.defined(source), ())):
                self.memory[to + i] = word & _WORD
        elif x.op in ("dma.hbm_to_vmem", "dma.vmem_to_hbm", "dma.general"):
            self.bytes += GRANULE * self.defined(size)
        else:
            raise ValueError(f"unknown instruction: {x.text}")

    def compute(self, x: Instruction):
        """The result of an instruction, or None if it is undefined."""
        if x.op.startswith("inlined_call_operand"):
            return self.operand(x)
        if x.op == "sld":
            return self.memory.get(self.value(x.args[0]))
        values = [self.value(a) for a in x.args]
        if x.op == "scalar_select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if x.op in _DECIDES and _DECIDES[x.op][0] in values:
            return _DECIDES[x.op][1]
        if x.op.startswith("scmp."):
            _, relation, kind = x.op.split(".")[:3]
            compute = getattr(operator, relation) if kind in ("s32", "u32") else None
            if kind == "s32" and None not in values:
                values = [_signed(x) for x in values]
        else:
            compute = _COMPUTE.get("scalar_lea" if x.op.startswith("scalar_lea.") else x.op)
        if compute is None:
            raise ValueError(f"unknown instruction: {x.text}")
        return None if None in values else int(compute(*values)) & _WORD

    def operand(self, x: Instruction):
        index, kind = re.search(r"index: (\d+), kind: (\w+)", x.text).groups()
        value = self.operands.get(int(index)) if kind == "input" else None
        if value is not None and x.op == "inlined_call_operand.":  # in a register
            return (value if isinstance(value, int) else value[0]) & _WORD
        address = self.address(x.to)
        if value is not None:
            # A copy from VMEM has the address in other units.
            self.tables[address] = self.tables[address << 4 & _WORD] = value
        return address

    def address(self, name: str) -> int:
        """An address for an allocation or array; they lie far apart."""
        return self.addresses.setdefault(name, (len(self.addresses) + 1) << 22)

    def defined(self, arg: str) -> int:
        """The value of an argument that decides something."""
        value = self.value(arg)
        if value is None:
            raise ValueError(f"{arg} is undefined")
        return value

    def value(self, arg: str):
        """Of a name, its negation, a number or a sum in brackets; None if it is undefined."""
        if arg[0] == "%":
            return self.names.get(arg)
        if arg[0] == "!":
            value = self.names.get(arg[1:])
            return None if value is None else 1 - value
        if arg[0] == "#":
            return self.address(arg)
        if arg[0] == "[":
            terms = [self.value(t.split(":")[-1].strip()) for t in arg.strip("[]").split(" + ")]
            return None if None in terms else sum(terms)
        return int(arg.removeprefix("$"), 0)
