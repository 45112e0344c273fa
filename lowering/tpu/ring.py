"""What the two ring kernels share: streams, neighbours, entry barrier, ids, where a ring fits.

The n devices along a mesh axis form a ring; right of device i is i + 1, modulo n. A block of an
array travels both ways at once, n // 2 hops in all to its farthest device, one hop per *step*. A
*stream* is one direction of one *lane*; a lane is a part of the block that moves on its own, so
that the hops of one lane run while another waits. With n odd every stream has (n - 1) / 2 hops.
With n even there is one device opposite, and a single way to it must be chosen: of an even lane the
right stream makes the last hop, of an odd one the left, so that two lanes load both ways equally.

Semaphores. A stream has a receive semaphore of its own for every copy that may be in flight at
once, since two copies may land in another order than they were sent; the kernels say how many that
is. Everything that is signalled, on this device or by a neighbour, is waited for before the kernel
ends, so all semaphores are zero then, and nobody writes to a device that has left.

Entry. A neighbour may not write here before this device is in the kernel: its buffers may still be
in use by whatever ran before. So each device first signals the barrier semaphore of its two
neighbours and waits for theirs. A device leaves a ring only with data from all others, hence after
all have passed the barrier, so the next use of the same semaphore by the same ring can not be taken
for this one. For another ring it could: an early device's signal would be counted by a neighbour
that still waits for its neighbours along another axis. So every pattern (gather, scatter) and every
axis of a mesh has a barrier of its own, by `collective_id`.

No device's part in any of this depends on data.
"""

import dataclasses
import math

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fp8moe_prims.lowering.tpu.chip import Chip
from fp8moe_prims.lowering.tpu.layout import LANES

RIGHT, LEFT = 1, -1

FIRST_ID = 64  # collective ids below are left to a program's own kernels
GATHER, SCATTER = 0, 1


def collective_id(mesh, axis, pattern: int) -> int:
    """The number of the barrier semaphore of a ring: one for each pattern, size and stride.

    Who is whose neighbour depends on the size of the axis and on how far apart in the order of the
    devices its neighbours are. All meshes of a program have the same devices, in the same order, so
    two rings of it share a number only where they are the same ring. The compiler maps the numbers
    in use to hardware semaphores.
    """
    size = mesh.shape[axis]
    stride = math.prod(mesh.axis_sizes[mesh.axis_names.index(axis) + 1 :])
    divisors = [d for d in range(1, mesh.size + 1) if mesh.size % d == 0]
    ring = divisors.index(size) * len(divisors) + divisors.index(stride)
    return FIRST_ID + 2 * ring + pattern


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along a mesh axis, as one of them sees it inside a kernel."""

    axis: str
    size: int

    def at(self, offset):
        """The position ``offset`` to the right of this device, |offset| <= size."""
        size = np.int32(self.size)
        return lax.rem(lax.axis_index(self.axis) + size + offset, size)

    def neighbour(self, direction: int):
        """How copies and signals name a neighbour; its other mesh coordinates are this device's."""
        return {self.axis: self.at(np.int32(direction))}

    def copy(self, source, target, send, receive, direction: int):
        """A copy to ``target`` of the neighbour, which signals ``receive`` there."""
        return pltpu.make_async_remote_copy(
            source, target, send, receive, device_id=self.neighbour(direction)
        )

    def enter(self):
        """The entry barrier with both neighbours."""
        barrier = pltpu.get_barrier_semaphore()
        for direction in (RIGHT, LEFT):
            pl.semaphore_signal(barrier, 1, device_id=self.neighbour(direction))
        pl.semaphore_wait(barrier, 2)


@dataclasses.dataclass(frozen=True)
class Stream:
    """One direction of a lane, and its hops: see the module."""

    lane: int
    direction: int
    hops: int


def streams(size: int, lanes: int) -> list[Stream]:
    """The streams that have hops to make."""
    made = []
    for lane in range(lanes):
        for direction in (RIGHT, LEFT):
            longer = (direction == RIGHT) == (lane % 2 == 0)
            made.append(Stream(lane, direction, size // 2 if longer else (size - 1) // 2))
    return [s for s in made if s.hops]


# --------------------------------------------------------------------------------------- pieces


def rows_of(shape) -> tuple[int, int]:
    """(rows, columns) that a block of this shape is moved as.

    Narrow rows would be padded to 128 columns in memory and on the wire, so such a block is flat.
    """
    total = math.prod(shape)
    columns = shape[-1] if shape else 1
    if columns >= LANES:
        return total // columns, columns
    return (total // LANES, LANES) if total and total % LANES == 0 else (1, total)


def tile_rows(dtype) -> int:
    """Rows of a tile in HBM: an array splits for free between tiles only."""
    return 32 // np.dtype(dtype).itemsize


# ----------------------------------------------------------------------------------------- choice


def fits(operation: str, p, mesh, chip: Chip, forced: bool) -> bool:
    """Whether a ring kernel runs, or jax.lax: from the mesh and the chip alone, at lowering time.

    A program is lowered for the whole mesh, so every device gets the same answer:

    - an operation that is not in ``p.rings``: no;
    - one device along the axis: no (and nothing is to be sent);
    - some axis of the mesh is not manual (shard_map over a part of the axes): no, since a kernel
      addresses devices by all their coordinates;
    - kernels asked for by name (use_lowering "mosaic" or "interpret"): yes;
    - else where each step along the axis, the one from last to first included, is at most one link
      of the chips' torus. The devices must be known for that: not in jax.export.
    """
    if operation not in p.rings or p.size == 1 or mesh is None:
        return False
    return forced or is_torus_ring(mesh, p.axis, chip)


def is_torus_ring(mesh, axis, chip: Chip) -> bool:
    """Whether neighbours along the axis are neighbours on the torus, or cores of one chip."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return False
    devices = mesh.devices
    if any(getattr(d, "coords", None) is None for d in devices.flat):
        return False
    extents = np.max([d.coords for d in devices.flat], axis=0) + 1
    lines = np.moveaxis(devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return all(
        _links(a, b, extents, chip) <= 1
        for line in lines
        for a, b in zip(line, np.roll(line, -1), strict=True)
    )


def _links(a, b, extents, chip: Chip) -> int:
    """Links between the chips of two devices."""
    links = 0
    for i, j, extent in zip(a.coords, b.coords, extents, strict=True):
        away = abs(i - j)
        links += min(away, extent - away) if _wraps(extent, chip) else away
    return int(links)


def _wraps(extent: int, chip: Chip) -> bool:
    """Whether a dimension of a slice closes to a ring: whole cubes of 4 on v5p and v7x do so, the
    full 16 chips of v5e and v6e."""
    if chip.name in ("v5p", "v7x"):
        return extent % 4 == 0
    return extent == 16 and chip.name in ("v5e", "v6e")
