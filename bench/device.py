"""Time per token with experts on a device, when the link to it is the bottleneck: what overlapping is worth.

    bench/device.py [MODEL] [--link-share 0.1] [--device-cache 50%] [--rounds 3]

Runs on ggml-sim, the simulated accelerator (build/bin/hobbit-exact, make build and cmake --build build). First all
experts are on the device and the link is free: that is computing's own time. Then the device holds --device-cache of
the experts and the link is as fast as brings one token's misses in 1 / --link-share of computing's time. The column
"beyond" is how much longer a token takes than the larger of computing alone and bytes / bandwidth. Rows: copies on a
queue of their own with and without copying ahead, and a loader whose copies block. Rounds take turns; medians with
minimum and maximum. Results are compared with stock on the CPU, bit for bit, in every run.

Without MODEL a random one of 190 MB is written to build/models.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXACT = ROOT / "build" / "bin" / "hobbit-exact"
SYNTH = ROOT / "build" / "models" / "device-bench.gguf"
SHAPE = {"layers": 6, "experts": 16, "used": 2, "embd": 1024, "ff": 320, "head-dim": 64}

ROWS: dict[str, tuple[list[str], dict[str, str]]] = {
    "queue, ahead": (["--hobbit", "prefetch=1"], {}),
    "queue": (["--hobbit", "prefetch=off"], {}),
    "blocking": (["--hobbit", "prefetch=off"], {"HOBBIT_SIM_ASYNC": "0"}),
}


def run(model: Path, n_tokens: int, arguments: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Milliseconds and bytes per token of one run, one token at a time."""
    steps = ["--prompt", "8", "--generate", str(n_tokens), "--ubatch", "1"]
    done = subprocess.run(
        [str(EXACT), "--model", str(model), *steps, "--sim", "1", "--cache", "110%", *arguments],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"hobbit-exact ended with {done.returncode}: {done.stdout}{done.stderr}")
    report = json.loads(done.stdout)["runs"][0]
    stats, sim = report["stats"], report["sim"][0]
    tokens = stats["decode_tokens"]
    return {
        "ms": stats["decode_us"] / tokens / 1e3,
        "compute_ms": sim["compute_us"] / tokens / 1e3,
        "bytes": sim["bytes_up"] / tokens,
        "link_ms": sim["link_us"] / tokens / 1e3,
        "ahead": stats["total"]["ahead_used"] / max(1, stats["total"]["ahead_issued"]),
    }


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--link-share", type=float, default=0.1)
    parser.add_argument("--device-cache", default="50%")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()

    model: Path = args.model or SYNTH
    if not args.model and not model.exists():
        shape = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
        like = ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"
        command = [sys.executable, str(ROOT / "bench" / "synth.py"), "--like", str(like), "-o", str(model), *shape]
        subprocess.run(command, check=True)

    # an odd allowance beside 100 %: banks round down
    alone = run(model, args.tokens, ["--device-cache", "120%", "--hobbit", "prefetch=off"], {})
    warm = run(model, args.tokens, ["--device-cache", args.device_cache, "--hobbit", "prefetch=off"], {})
    bandwidth = warm["bytes"] / (alone["compute_ms"] / args.link_share) * 1e3  # bytes per second
    link = {"HOBBIT_SIM_BANDWIDTH_MBPS": f"{bandwidth / 1e6:.6f}"}

    results: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for _ in range(args.rounds):
        for name, (arguments, environment) in ROWS.items():
            results[name].append(
                run(model, args.tokens, ["--device-cache", args.device_cache, *arguments], {**link, **environment})
            )

    print(f"{model.name}, device cache {args.device_cache}, link {bandwidth / 1e6:.1f} MB/s, computing alone", end=" ")
    print(f"{alone['compute_ms']:.2f} ms per token; {os.cpu_count()} cores, {args.rounds} rounds")
    print("| copies | ms per token | MB per token | on the link, ms | beyond max(computing, link) | ahead used |")
    print("|---|---|---|---|---|---|")
    for name, runs in results.items():
        over = [100 * (r["ms"] / max(alone["compute_ms"], r["link_ms"]) - 1) for r in runs]
        print(
            f"| {name} | {middle([r['ms'] for r in runs])} | {statistics.median(r['bytes'] for r in runs) / 1e6:.2f} "
            f"| {statistics.median(r['link_ms'] for r in runs):.2f} | {middle(over)} % "
            f"| {100 * statistics.median(r['ahead'] for r in runs):.0f} % |"
        )


if __name__ == "__main__":
    main()
