"""The interpreter's race detector, for the tests of kernels."""

import contextlib
from unittest import mock

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def watched():
    """Yields the states of the detectors that run within, which say whether they found a race."""
    states, state = [], interpreter.RaceDetectionState

    def made(*args, **kwargs):
        states.append(state(*args, **kwargs))
        return states[-1]

    with mock.patch.object(interpreter, "RaceDetectionState", made):
        yield states


def found(states) -> bool:
    return any(s.races_found for s in states)


def params(races=True, **more):
    """InterpretParams that look for races, if ``races``."""
    if hasattr(pltpu.InterpretParams, "on_race"):  # newer than JAX 0.10: a race raises unless
        more["on_race"] = "warn"
    return pltpu.InterpretParams(detect_races=races, **more)
