"""The machine's side: what each primitive becomes, per platform.

``xla/<op>.py`` and ``tpu/<op>.py`` hold plain array functions named like the files in
``fp8moe_prims/``. The package is only importable as ``fp8moe_prims.lowering``: a top-level package
of so common a name would be overwritten by another distribution's without a warning.
"""

if __name__ != "fp8moe_prims.lowering":
    raise ImportError(
        f"{__name__!r} must be imported as 'fp8moe_prims.lowering'; import fp8moe_prims first."
    )
