"""Prints the table of primitives and their rules, from the registry, as Markdown for the README."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from fp8moe_prims import primitives


def main():
    rules = ("batch", "jvp", "transpose")
    print(f"| primitive | {' | '.join(rules)} | cpu, cuda, rocm | tpu |")
    print("|---" * (len(rules) + 3) + "|")
    for name, p in sorted(primitives.registry.items()):
        marks = ["no" if hasattr(p.rules[r], "reason") else "yes" for r in rules]
        xla, tpu = (f"`{p.lowerings[k].partition(':')[0]}`" for k in ("cpu", "tpu"))
        print(f"| `{name}` | {' | '.join(marks)} | {xla} | {tpu} |")


if __name__ == "__main__":
    main()
