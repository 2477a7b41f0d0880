"""Time per token with experts on a device, when the link is the bottleneck: what overlapping and the CPU are worth.

    bench/device.py [MODEL ...] [--link-shares 1,0.1] [--device-cache 50%] [--rounds 3]

Runs on ggml-sim, the simulated accelerator (build/bin/hobbit-exact, make build and cmake --build build). First all
experts are on the device and the link is free: that is computing's own time. Then the device holds --device-cache of
the experts, and for each link share S the link is as fast as brings one token's misses in 1 / S of computing's time.
The column "beyond" is how much longer a token takes than the larger of computing alone and bytes / bandwidth. Rows: a
loader whose copies block, copies on a queue of their own, with copying ahead too, and --hobbit-miss cpu and auto
beside that queue. Rounds take turns; medians with minimum and maximum. Results are compared with stock on the CPU, bit
for bit, in every run.

Without MODEL two are written to build/models: a random one of 190 MB, whose routers nobody can predict, and tiny-moe
with experts 4 times as wide, whose routers were trained.
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
REAL = ROOT / "build" / "models" / "tiny-moe-x4.gguf"
SHAPE = {"layers": 6, "experts": 16, "used": 2, "embd": 1024, "ff": 320, "head-dim": 64}

OFF = ["--hobbit", "prefetch=off"]
ROWS: dict[str, tuple[list[str], dict[str, str]]] = {
    "load, blocking": (OFF, {"HOBBIT_SIM_ASYNC": "0"}),
    "load, queue": (OFF, {}),
    "load, queue, ahead": (["--hobbit", "prefetch=1"], {}),
    "cpu": ([*OFF, "--hobbit", "miss=cpu"], {}),
    "auto": ([*OFF, "--hobbit", "miss=auto"], {}),
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
        "cpu": stats["total"]["cpu_computed"] / tokens,
    }


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def models() -> list[Path]:
    """A random model and one with real routing, written if they are not there."""
    like = ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    commands = {
        SYNTH: ["synth.py", "--like", str(like), "-o", str(SYNTH), *shape],
        REAL: ["inflate.py", str(like), "-o", str(REAL), "-k", "4"],
    }
    for path, command in commands.items():
        if not path.exists():
            subprocess.run([sys.executable, str(ROOT / "bench" / command[0]), *command[1:]], check=True)
    return list(commands)


def measure(model: Path, args: argparse.Namespace) -> None:
    """Prints the table of one model."""
    # an odd allowance beside 100 %: banks round down
    alone = run(model, args.tokens, ["--device-cache", "120%", *OFF], {})
    warm = run(model, args.tokens, ["--device-cache", args.device_cache, *OFF], {})
    print(
        f"{model.name}, device cache {args.device_cache}, computing alone {alone['compute_ms']:.2f} ms per token;",
        end=" ",
    )
    print(f"{os.cpu_count()} cores, {args.rounds} rounds")
    print("| link | misses | ms per token | MB per token | on the link, ms | beyond | ahead used | on the CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for share in args.link_shares:
        bandwidth = warm["bytes"] / (alone["compute_ms"] / share) * 1e3  # bytes per second
        link = {"HOBBIT_SIM_BANDWIDTH_MBPS": f"{bandwidth / 1e6:.6f}"}
        results: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
        for _ in range(args.rounds):
            for name, (arguments, environment) in ROWS.items():
                all_arguments = ["--device-cache", args.device_cache, *arguments]
                results[name].append(run(model, args.tokens, all_arguments, {**link, **environment}))
        for name, runs in results.items():
            over = [100 * (r["ms"] / max(alone["compute_ms"], r["link_ms"]) - 1) for r in runs]
            print(
                f"| {bandwidth / 1e6:.0f} MB/s | {name} | {middle([r['ms'] for r in runs])} "
                f"| {statistics.median(r['bytes'] for r in runs) / 1e6:.2f} "
                f"| {statistics.median(r['link_ms'] for r in runs):.2f} | {middle(over)} % "
                f"| {100 * statistics.median(r['ahead'] for r in runs):.0f} % "
                f"| {statistics.median(r['cpu'] for r in runs):.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--link-shares", type=lambda text: [float(x) for x in text.split(",")], default=[1.0, 0.1])
    parser.add_argument("--device-cache", default="50%")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    for model in args.models or models():
        measure(model, args)


if __name__ == "__main__":
    main()
