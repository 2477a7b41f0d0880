"""Strategies of other systems on this engine, and the systems themselves that pip can install, under one memory cap.

    sudo .venv/bin/python bench/strategies.py MODEL --low FILE [--cap-share 0.35] [--rounds 5] [--json FILE]

Same weights, same cap (a cgroup: anonymous memory and page cache), same disk, same prompt, same number of greedy
tokens; all sides take turns, round by round. The first rows are imitations of a strategy, not of a system: kernels,
formats and I/O are this engine's (docs/policy.md says what each loads and evicts). Peers are the real ones
(bench/peers.py), in float16; one that cannot run says why. MiB per token are what the disk read while decoding; "as
stock" is how many tokens, from the first on, are those of stock llama.cpp.

With --json a round is added to what the file holds, so that five calls with --rounds 1 make one table; --rounds 0
prepares, or prints the table again. `--smallest`
instead looks for the smallest cap, in steps of the model's size, at which each peer runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import capped  # noqa: E402
import peers  # noqa: E402
from cage import spread  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from hobbit_py.hobbit import Llama  # noqa: E402

EXACT = "--hobbit-precision high"
STRATEGIES = {
    "llama.cpp, static split": f"{EXACT} --hobbit-policy static --hobbit-prefetch off",
    "DeepSpeed, whole layers": f"{EXACT} --hobbit-policy static --hobbit-unit layer --hobbit-prefetch off",
    "Mixtral-offloading": f"{EXACT} --hobbit-policy lru-layer --hobbit-prefetch 1",
    "MoE-Infinity": f"{EXACT} --hobbit-policy activations --hobbit-predictor activations --hobbit-prefetch 2",
    "HOBBIT, exact": EXACT,
    "MoE-APEX": "--hobbit-precision paper --hobbit-policy lcu",
    "HOBBIT, as published": "--hobbit-precision paper",
    "HOBBIT": "--hobbit-policy hobbit",
}
STOCK = ("llama.cpp, mmap", "llama.cpp, mmap, read-ahead 8192")  # and what Fiddler does without a device
HISTORY = 4  # past requests that MoE-Infinity's imitation knows
COMPILE_S = 1800  # seconds that a peer may take the first time
CAPS = (0.35, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
WHAT = ("decode", "prefill", "bytes_per_token", "peak", "same")


def stock_tokens(args: argparse.Namespace) -> tuple[list[int], list[int], list[bytes]]:
    """The prompt's tokens, what stock continues it with, and the text of each of the latter."""
    llm = Llama(
        str(args.model),
        n_ctx=args.context,
        n_batch=512,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=False,
    )
    prompt = llm.tokenize(args.prompt.encode())
    llm.eval(prompt)
    ids: list[int] = []
    while len(ids) < args.tokens:
        ids.append(llm.sample(temp=0.0))
        llm.eval(ids[-1:])
    pieces = [llm.detokenize([i]) for i in ids]
    llm.close()
    return prompt, ids, pieces


def same_text(pieces: list[bytes], text: str) -> int:
    """How many of the tokens the text begins with."""
    n = len(pieces)
    while n and not text.encode().startswith(b"".join(pieces[:n])):
        n -= 1
    return n


def same_ids(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def write_history(args: argparse.Namespace, path: Path) -> None:
    """Activation matrices of a few requests of another text, as a profile; without the experts that were resident."""
    text = (capped.ROOT / "models/tiny-moe/heldout.txt").read_text()
    path.unlink(missing_ok=True)
    for i in range(HISTORY):
        prompt = text[i * len(text) // HISTORY :][:600]
        command = [args.bin / "llama-completion", "-m", args.model, "-no-cnv", "-p", prompt, "-n", 16, "--ignore-eos"]
        command += ["-t", args.threads, "--no-warmup", *STRATEGIES["MoE-Infinity"].split(), "--hobbit-profile", path]
        subprocess.run([str(c) for c in command], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if line.split()[0] in ("hobbit-profile", "past")) + "\n")


def make_sides(args: argparse.Namespace, history: Path) -> list[capped.Side]:
    sides = [capped.Side(STOCK[0], []), capped.Side(STOCK[1], [], 8192)]
    for name, options in STRATEGIES.items():
        more = ["--hobbit-cache", args.cache]
        if EXACT not in options:
            if not args.low:
                continue
            more += ["--hobbit-low", str(args.low)]
        sides.append(capped.Side(name, [*options.split(), *more]))
        if "activations" in options:
            sides[-1].profile = history
    return sides


def history_of(args: argparse.Namespace) -> Path:
    return args.model.with_suffix(".history")


def prepare(args: argparse.Namespace, state: dict[str, Any]) -> None:
    """All that a round needs and that is no part of it; nothing to do the second time.

    Each peer generates once without a cap: some compile then, and one that fails here needs no further try.
    """
    if not history_of(args).exists():
        print(f"writing {history_of(args).name}", flush=True)
        write_history(args, history_of(args))
    few = argparse.Namespace(**{**vars(args), "tokens": 2})
    for peer in peers.PEERS:
        if peer.name in state["tried"]:
            continue
        found: peers.Result | str = peers.install(peer) or peers.run(peer, few, list(range(300, 316)), None, COMPILE_S)
        state["tried"].append(peer.name)
        if isinstance(found, str):
            state["reasons"][peer.name] = f"without a cap: {found}"
        print(f"  {peer.name}: {found if isinstance(found, str) else 'runs without a cap'}", flush=True)


def add_round(args: argparse.Namespace, cap: int, state: dict[str, Any]) -> None:
    """Measures every side once more; what is known of each is in `state` when this returns."""
    prompt, ids, pieces = stock_tokens(args)

    def add(name: str, **values: float) -> None:
        row = state["sides"].setdefault(name, {what: [] for what in WHAT})
        for what in WHAT:
            row[what].append(values[what])

    for side in make_sides(args, history_of(args)):
        capped.measure(side, args, cap)
        same = same_text(pieces, side.text)
        if same < args.tokens and (not side.options or EXACT.split()[-1] in side.options):
            raise SystemExit(f"{side.name}: only the first {same} tokens are stock's, and it should be exact")
        add(side.name, same=same, **{what: getattr(side, what)[-1] for what in WHAT[:-1]})
    for peer in peers.PEERS:
        if peer.name in state["reasons"]:
            continue
        found = peers.run(peer, args, prompt, cap)
        if isinstance(found, str):
            state["reasons"][peer.name] = found
            print(f"  {peer.name:<26} {found}", flush=True)
            continue
        values = {what: getattr(found, what) for what in WHAT[:-1]}
        add(peer.name, same=same_ids(ids, found.ids), **values)
        print(f"  {peer.name:<26} {found.decode:8.2f} tok/s  prefill {found.prefill:8.2f} tok/s", flush=True)


def show(args: argparse.Namespace, cap: int, state: dict[str, Any]) -> None:
    sides = state["sides"]
    table = Table()
    for column in ("", "decode tok/s", "/ stock", "prefill tok/s", "/ stock", "MiB/token", "peak MiB", "as stock"):
        table.add_column(column)

    def ratio(row: dict[str, list[float]], what: str) -> str:
        best = [max(values) for values in zip(*(sides[name][what] for name in STOCK), strict=True)]
        # a peer that failed in one round has fewer values
        return spread([a / b for a, b in zip(row[what], best, strict=False)])

    for name, row in sides.items():
        table.add_row(
            name,
            spread(row["decode"]),
            ratio(row, "decode"),
            spread(row["prefill"], digits=0),
            ratio(row, "prefill"),
            spread(row["bytes_per_token"], 2**20, 1),
            f"{max(row['peak']) / 2**20:.0f}",
            f"{min(row['same'])} of {args.tokens}",
        )
    for name, reason in state["reasons"].items():
        if name not in sides:
            table.add_row(name, reason)
    console = Console(width=200, highlight=False)
    console.print(f"{args.model.name}: {args.model.stat().st_size / 2**20:.0f} MiB, cap {cap / 2**20:.0f} MiB")
    console.print(table)
    rounds = len(sides[STOCK[0]]["decode"])
    console.print(f"medians (min .. max) of {rounds}; ratios within a round to the better stock side")
    console.print(f"{os.cpu_count()} CPUs ({platform.machine()}), Linux {os.uname().release}, {args.threads} threads")
    console.print(f"repeat with: python {' '.join(sys.argv)}")


def smallest_caps(args: argparse.Namespace) -> None:
    """Prints for each peer the first of CAPS at which it generates."""
    prompt, _, _ = stock_tokens(args)
    size = args.model.stat().st_size
    for peer in peers.PEERS:
        found: peers.Result | str = peers.install(peer)
        for share in CAPS if not found else ():
            found = peers.run(peer, args, prompt, int(share * size))
            said = found if isinstance(found, str) else "runs"
            print(f"{peer.name}: {100 * share:.0f} % ({share * size / 2**20:.0f} MiB): {said}", flush=True)
            if said != "killed at the cap":
                break
        else:
            print(f"{peer.name}: {found or 'at none of these caps'}")


def main() -> None:
    parser = capped.make_parser(__doc__, tokens=24, prompt_tokens=253)
    parser.add_argument("--json", type=Path, help="where measured rounds are kept, and added to")
    parser.add_argument("--smallest", action="store_true", help="look for the peers' smallest cap")
    args = parser.parse_args()
    args.prompt = capped.prompt_of(args)
    if args.smallest:
        smallest_caps(args)
        return

    cap = int(args.model.stat().st_size * args.cap_share)
    settings = {name: str(getattr(args, name)) for name in ("model", "low", "cap_share", "cache", "tokens", "prompt")}
    state: dict[str, Any] = {"settings": settings, "sides": {}, "reasons": {}, "tried": []}
    if args.json and args.json.exists():
        state = json.loads(args.json.read_text())
        if state["settings"] != settings:
            raise SystemExit(f"{args.json}: holds rounds of other settings")
    prepare(args, state)
    for i in range(args.rounds + 1):
        if i > 0:
            add_round(args, cap, state)
        if args.json:
            args.json.write_text(json.dumps(state, indent=1))
    if state["sides"]:
        show(args, cap, state)


if __name__ == "__main__":
    main()
