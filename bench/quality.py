"""The tables of docs/quality.md: `hobbit quality` over the settings that each of them compares.

    .venv/bin/python bench/quality.py table|figure3b|depth|prefill|rules|calibrate MODEL [--text F] [--chunks 32] [...]

Everything is kept in --work, so that a call that was interrupted goes on, and tables share what they have in common.
`depth` makes low files in which one layer, or all but one, is in Q2_K: what each layer's precision is worth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import gguf

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hobbit_py.quality import UNIFORM, Variants  # noqa: E402

PAIRS = ("model+Q8_0", "model+Q4_0", "model+Q2_K", "Q8_0+Q2_K", "Q5_K+Q2_K", "Q4_K+Q2_K")
LOWER = ("Q4_K+Q2_K", "Q5_K+Q2_K")
RIVALS = ["exact", *(f"uniform:{t}" for t in UNIFORM)]
TABLES = {
    "table": [
        *RIVALS,
        *(f"{pair}@{t}" for pair in PAIRS for t in ("paper", "quantile", "noskip")),
        "article:model+Q4_0@0.6/0.9",
        "skip@0.6",
        "skip@0.9",
    ],
    "figure3b": [
        "exact",
        *(f"skip@{t}" for t in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)),
        *(f"model+Q4_0@{t}/1" for t in (0.95, 0.9, 0.8, 0.6, 0.4, 0)),
        *(f"model+Q2_K@{t}/1" for t in (0.95, 0.9, 0.8, 0.6, 0.4, 0)),
    ],
    "rules": [
        *RIVALS,
        *(f"{s}{r}" for s in ("model+Q4_0@0.6/0.9", "model+Q4_0@0.6/0.95", "skip@0.9") for r in ("", "/renormalise")),
        *(f"{pair}@{t}/1" for pair in LOWER for t in (0, 0.4, 0.6, 0.8)),
    ],
    "prefill": [
        "exact",
        "uniform:Q4_K",
        "uniform:Q2_K",
        *(f"{pair}@{t}" for pair in ("model+Q4_0", "Q8_0+Q2_K") for t in ("paper", "noskip")),
    ],
}  # fmt: skip


def layered(variants: Variants, base: str, other: str, layers: set[int], out: Path) -> Path:
    """A low file whose experts have type `other` in these layers and `base` in the rest."""
    if out.is_file():
        return out
    readers = {name: gguf.GGUFReader(variants.low_file(name)) for name in (base, other)}
    theirs = {t.name: t for t in readers[other].tensors}
    first = readers[base]
    writer = gguf.GGUFWriter(out.with_suffix(".tmp"), first.fields["general.architecture"].contents())
    for field in first.fields.values():
        # the writer has an alignment of its own
        if not field.name.startswith(("GGUF.", "hobbit.pair.sha256", "general.a")):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[1] if is_array else None)
    for t in first.tensors:
        block = int(t.name.split(".")[1])
        t = theirs[t.name] if block in layers and "_exps" in t.name else t
        quantised = t.tensor_type not in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out.with_suffix(".tmp").rename(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TABLES, "depth", "calibrate"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path)
    parser.add_argument("--text", type=Path, default=ROOT / "models/tiny-moe/heldout.txt")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path, help="folder for JSON and pictures (default: the work folder)")
    args, more = parser.parse_known_args()
    work = args.work or args.model.with_suffix(".quality")
    out = args.out or work
    out.mkdir(parents=True, exist_ok=True)

    def quality(name: str, settings: list[str], *options: object) -> None:
        command = [
            sys.executable,
            "-m",
            "hobbit_py",
            "quality",
            args.model,
            "--text",
            args.text,
            "--work",
            work,
            *options,
        ]
        command += [*(["--settings", " ".join(settings)] if settings else []), "--json", out / f"{name}.json"]
        command += ["--plot", out / f"{name}.png", *more]
        print(f"\n{name}", flush=True)
        subprocess.run([str(c) for c in command], cwd=ROOT, check=True)

    if args.what == "calibrate":
        quality("calibrate", [], "--low", args.low, "--profile", out / "profile", "--cache", "0")
    elif args.what == "depth":
        variants = Variants(args.model, work)
        blocks = sorted({int(t.name.split(".")[1]) for t in gguf.GGUFReader(args.model).tensors if "_exps" in t.name})
        for block in blocks:
            for name, base, other in (("only", "Q8_0", "Q2_K"), ("all-but", "Q2_K", "Q8_0")):
                low = layered(variants, base, other, {block}, work / f"q2k-{name}-{block}.gguf")
                quality(f"{name}-{block}", ["uniform:file"], "--low", low, "--cache", "0")
    else:
        options = ("--prefill", "--cache", "0") if args.what == "prefill" else ()
        options = ("--cache", "0") if args.what == "figure3b" else options
        quality(args.what, TABLES[args.what], *options)


if __name__ == "__main__":
    main()
