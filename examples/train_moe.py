"""Trains one small mixture-of-experts language model three times: fp8, fp8 and bf16.

    python examples/train_moe.py                    a minute or two on two CPU cores
    python examples/train_moe.py --runs in_kernel,bf16 --steps 1000

The runs start from the same parameters and see the same batches; only how the experts' matmuls
quantize differs. The final losses stand in a table at the end, the curves in out/train_moe.png. The
exit code is 1 if an fp8 run ends more than 1% above or below bf16.
"""

import argparse
import functools
import math
import pathlib
import sys
import time

import _model
import _text
import jax
import jax.numpy as jnp
import numpy as np

import fp8moe_prims as fp8

RECIPES = {
    "in_kernel": fp8.QuantRecipe(),  # fp8, quantized inside the kernels, backward too
    "dense": fp8.QuantRecipe(backward="dense"),  # fp8, the backward pass quantized around them
    "bf16": None,  # nothing is quantized
}
BATCH, LENGTH = 8, 64
EVALUATION_BATCHES = 20
LEARNING_RATE, WARMUP = 3e-3, 20
TOLERANCE = 0.01
LAST = 20  # steps that the final training loss is the mean of


@functools.partial(jax.jit, static_argnames=("recipe", "moe"), donate_argnames="state")
def train_step(state, tokens, rate, *, recipe, moe):
    """One step of Adam: (the new state, cross-entropy before it)."""

    def objective(params):
        cross_entropy, balance = _model.loss(params, tokens, recipe, moe)
        return cross_entropy + np.float32(_model.BALANCE) * balance, cross_entropy

    grads, cross_entropy = jax.grad(objective, has_aux=True)(state["params"])
    b1, b2, eps = np.float32(0.9), np.float32(0.98), np.float32(1e-8)
    count = state["count"] + np.float32(1)
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mean"], grads)
    square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["square"], grads)
    # The corrections for the moments' start at zero.
    fix_mean, fix_square = 1 / (1 - b1**count), 1 / (1 - b2**count)
    params = jax.tree.map(
        lambda p, m, v: p - rate * (m * fix_mean) / (jnp.sqrt(v * fix_square) + eps),
        state["params"],
        mean,
        square,
    )
    return {"params": params, "mean": mean, "square": square, "count": count}, cross_entropy


def learning_rate(step: int, steps: int, top: float) -> np.float32:
    """Up in a straight line to the top, then down in one to 0."""
    return np.float32(top * min((step + 1) / WARMUP, (steps - step) / steps))


def train(
    name,
    recipe,
    text,
    held_out,
    *,
    steps,
    seed,
    every=None,
    rate=LEARNING_RATE,
    init=_model.init,
    moe=fp8.moe.moe_ffn,
) -> tuple[np.ndarray, dict[int, float]]:
    """One run.

    Args:
      every: evaluate each time so many steps are done, not at the end alone.
      rate: the highest learning rate.
      init: what makes the parameters, called as `_model.init` is.
      moe: what computes the experts, called as `fp8moe_prims.moe.moe_ffn` is.

    Returns:
      The training loss of each step [steps], and the held-out loss after some of them.
    """
    params = init(seed, _text.VOCABULARY, LENGTH)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    state = {
        "params": params,
        "mean": zeros(params),
        "square": zeros(params),
        "count": jnp.zeros((), jnp.float32),
    }
    random = np.random.default_rng(seed)
    progress = Progress(name, steps)
    losses, evaluations = np.zeros(steps), {}
    for step in range(steps):
        starts = random.integers(0, text.size - LENGTH, BATCH)
        tokens = _text.windows(text, starts, LENGTH)
        at = learning_rate(step, steps, rate)
        state, loss = train_step(state, tokens, at, recipe=recipe, moe=moe)
        losses[step] = loss
        progress.update(step + 1, losses[step])
        if step + 1 == steps or (every and (step + 1) % every == 0):
            evaluations[step + 1] = evaluate(state["params"], held_out, recipe, moe)
    return losses, evaluations


@functools.partial(jax.jit, static_argnames=("recipe", "moe"))
def cross_entropy(params, tokens, *, recipe, moe):
    return _model.loss(params, tokens, recipe, moe)[0]


def evaluate(params, text, recipe, moe) -> float:
    """The mean cross-entropy over EVALUATION_BATCHES that are spread over the text."""
    starts = np.linspace(0, text.size - LENGTH - 1, EVALUATION_BATCHES * BATCH).astype(int)
    total = 0.0
    for batch in _text.windows(text, starts, LENGTH).reshape(EVALUATION_BATCHES, BATCH, -1):
        total += float(cross_entropy(params, batch, recipe=recipe, moe=moe))
    return total / EVALUATION_BATCHES


class Progress:
    """One line a run, rewritten in place; plain lines, fewer, where the output is no terminal."""

    def __init__(self, name: str, steps: int):
        self.name, self.steps = name, steps
        self.live = sys.stdout.isatty()
        self.started = None
        if self.live:
            print(f"{name:10} compiling", end="", flush=True)

    def update(self, step: int, loss: float):
        if self.started is None:
            self.started = time.perf_counter()  # after the first step, which compiles
            speed = "-"
        else:
            seconds = time.perf_counter() - self.started
            speed = f"{(step - 1) * BATCH * LENGTH / seconds:.0f}"
        line = f"{self.name:10} step {step:4}/{self.steps}  loss {loss:6.4f}  {speed:>7} tokens/s"
        if self.live:
            print(f"\r{line}", end="\n" if step == self.steps else "", flush=True)
        elif step % 50 == 0 or step in (1, self.steps):
            print(line, flush=True)


def report(results) -> bool:
    """Prints the table of final losses; whether all are finite and fp8 ends where bf16 does."""
    final = {name: (run[0][-LAST:].mean(), run[1]) for name, run in results.items()}
    base = final.get("bf16")
    print(f"\n{'run':10}  training loss   vs bf16  held-out loss   vs bf16")
    wrong = []
    for name, values in final.items():
        line = f"{name:10}"
        for i, value in enumerate(values):
            apart = value / base[i] - 1 if base else 0.0
            line += f"  {value:13.4f}  " + (f"{apart:+8.2%}" if base else f"{'-':>8}")
            if not (math.isfinite(value) and abs(apart) <= TOLERANCE):
                wrong.append(name)
        print(line)
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        print(f"Failed: not finite, or more than {TOLERANCE:.0%} from bf16: {names}")
    return not wrong


def draw(results, entropy, path: pathlib.Path):
    """Writes the loss curves to a picture."""
    try:
        import matplotlib
    except ImportError:
        print("No picture: matplotlib is not installed (pip install 'fp8moe_prims[plots]').")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for (name, (losses, held_out)), style in zip(results.items(), ("-", "--", ":"), strict=False):
        # Single batches differ more than the runs do: show the mean of LAST steps.
        window = min(LAST, len(losses))
        smooth = np.convolve(losses, np.full(window, 1 / window), "valid")
        steps = np.arange(window, len(losses) + 1)
        axes.plot(steps, smooth, style, label=f"{name}, held-out {held_out:.3f}")
    axes.axhline(entropy, color="gray", linewidth=0.8, label="unigram entropy")
    axes.set(xlabel="step", ylabel=f"training loss, nats per byte (mean of {LAST} steps)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"Loss curves: {path}")


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument(
        "--runs", default=",".join(RECIPES), help="some of %(default)s, separated by commas"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default="out/train_moe.png", help="the picture (%(default)s)"
    )
    options = parser.parse_args(arguments)
    runs = options.runs.split(",")
    if unknown := [name for name in runs if name not in RECIPES]:
        parser.error(f"--runs: takes some of {', '.join(RECIPES)}, got {', '.join(unknown)}")
    if options.steps < 1:
        parser.error(f"--steps: must be at least 1, got {options.steps}")

    text, held_out = _text.load()
    entropy = _text.unigram_entropy(text)
    print(f"{text.size} bytes of the Python standard library, unigram entropy {entropy:.3f} nats")
    results = {}
    for name in runs:
        losses, evaluations = train(
            name, RECIPES[name], text, held_out, steps=options.steps, seed=options.seed
        )
        results[name] = losses, evaluations[options.steps]
    good = report(results)
    draw(results, entropy, options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
