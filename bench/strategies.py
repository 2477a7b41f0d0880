"""Strategies of other systems on this engine, in the table of bench/capped.py: same files, same cap, same disk.

    sudo .venv/bin/python bench/strategies.py MODEL --low FILE [options of bench/capped.py]

Imitations of the strategy, not of the system: kernels, formats and I/O are ours on every side. What is loaded is one
expert, and the CPU computes with it, unless the table says otherwise (docs/policy.md). There are no imitations of
MoE-Infinity (activation matrices of past requests) and of DeepSpeed's streaming of whole layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import capped  # noqa: E402

# docs/policy.md says what each loads and evicts. llama.cpp and, without a device, Fiddler are capped.py's stock sides
STRATEGIES = {
    "on demand, LRU": "--hobbit-precision high --hobbit-policy lru --hobbit-prefetch off",
    "mixtral-offloading": "--hobbit-precision high --hobbit-policy lru-layer --hobbit-prefetch 1",
    "MoE-APEX": "--hobbit-policy lcu",
    "HOBBIT": "--hobbit-policy hobbit",
}


def main() -> None:
    arguments = sys.argv[1:]
    low = arguments[arguments.index("--low") + 1] if "--low" in arguments else None
    cache = arguments[arguments.index("--cache") + 1] if "--cache" in arguments else "auto"
    for name, options in STRATEGIES.items():
        if "--hobbit-precision high" not in options:
            if low is None:
                continue
            options += f" --hobbit-low {low}"
        sys.argv += ["--side", f"{name}={options} --hobbit-cache {cache}"]
    capped.main()


if __name__ == "__main__":
    main()
