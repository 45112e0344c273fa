"""The table of ring collectives: how many devices, what shape, gathered or scattered where."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import fp8moe_prims as fp8

DTYPES = dict(f32=jnp.float32, bf16=jnp.bfloat16, e4m3=jnp.float8_e4m3fn, int8=jnp.int8)


@dataclasses.dataclass(frozen=True)
class RingCase:
    """One call on each of ``devices`` along axis "x", in ``groups`` rings along a second axis."""

    op: str  # "ring_all_gather" or "ring_reduce_scatter"
    devices: int
    rows: int  # of a block
    width: int
    kind: str = "f32"
    groups: int = 1
    first: bool = True  # whether "x" is the first of the mesh axes
    axis: int = 0
    tiled: bool = True
    tags: tuple[str, ...] = ()

    @property
    def name(self):
        how = f"{'tiled' if self.tiled else 'stacked'}{self.axis}"
        where = f"{self.devices}x{self.groups}" if self.first else f"{self.groups}y{self.devices}"
        op = self.op.removeprefix("ring_")
        return f"{op}/{where}/{self.rows}x{self.width}/{self.kind}/{how}"

    @property
    def gathers(self):
        return self.op == "ring_all_gather"

    @property
    def mesh(self):
        return mesh(self.devices, self.groups, self.first)

    @property
    def shape(self):
        """Of the operand on one device."""
        shape = [self.rows, self.width]
        if not self.gathers:
            if self.tiled:
                shape[self.axis] *= self.devices
            else:
                shape.insert(self.axis, self.devices)
        return tuple(shape)

    @property
    def input(self):
        """The operands of all devices, [devices of the mesh, *shape]."""
        rng = np.random.default_rng(sum(map(ord, self.name)))
        x = rng.standard_normal((self.devices * self.groups, *self.shape))
        if self.kind == "int8":
            x = np.round(20 * x)
        return jnp.asarray(x.astype(np.float32)).astype(DTYPES[self.kind])

    def ours(self, x):
        if self.gathers:
            return fp8.ring_all_gather(x, "x", axis=self.axis, tiled=self.tiled)
        return fp8.ring_reduce_scatter(x, "x", scatter_dimension=self.axis, tiled=self.tiled)

    def theirs(self, x):
        if self.gathers:
            return jax.lax.all_gather(x, "x", axis=self.axis, tiled=self.tiled)
        return jax.lax.psum_scatter(x, "x", scatter_dimension=self.axis, tiled=self.tiled)

    def mapped(self, fn, check_vma=True):
        """fn over the devices: [devices, *shape] -> [devices, *result], for each of its results."""
        return over(self.mesh, lambda x: jax.tree.map(lambda y: y[None], fn(x[0])), check_vma)


def over(mesh, fn, check_vma=True):
    spec = jax.P(mesh.axis_names)
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def mesh(devices, groups=1, first=True):
    """The first devices as a mesh of axes "x" and "y", in this order or the other."""
    at = np.array(jax.devices()[: devices * groups])
    if first:
        return jax.sharding.Mesh(at.reshape(devices, groups), ("x", "y"))
    return jax.sharding.Mesh(at.reshape(groups, devices), ("y", "x"))


def _all():
    gather = functools.partial(RingCase, "ring_all_gather")
    scatter = functools.partial(RingCase, "ring_reduce_scatter")
    ci = ("ci",)
    yield gather(1, 3, 200, tags=ci)
    yield scatter(1, 3, 200, tags=ci)
    yield gather(2, 1, 128, "e4m3", groups=2, axis=1, tags=ci)
    yield gather(3, 3, 200, "bf16", axis=1, tiled=False, tags=ci)
    yield scatter(2, 16, 128, "bf16", groups=2, first=False, tags=ci)
    yield scatter(3, 1, 200, axis=1, tags=ci)
    yield gather(4, 16, 128, groups=2, first=False, tags=ci)
    yield gather(5, 64, 128, "int8", tiled=False, tags=ci)
    yield scatter(4, 3, 200, tiled=False, axis=2, tags=ci)
    yield scatter(8, 16, 128, tags=ci)
    sizes = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (8, 1))
    for (n, groups), rows, width, tiled in itertools.product(
        sizes, (1, 3, 16), (128, 200), (True, False)
    ):
        for i, make in enumerate((gather, scatter)):
            axis = (rows + n + i) % 2
            kinds = ("f32", "bf16", "e4m3", "int8") if make is gather else ("f32", "bf16")
            kind = kinds[(rows + width // 8 + n + tiled) % len(kinds)]
            kind = "f32" if rows == 16 else kind
            yield make(n, rows, width, kind, groups=groups, first=rows != 3, axis=axis, tiled=tiled)


CASES = tuple({c.name: c for c in reversed(tuple(_all()))}.values())
