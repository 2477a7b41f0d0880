"""`hobbit bench`: our llama-bench, with its rows as a table that has stock and the cache's numbers in it.

What is measured and how is llama-bench's; so are all options that are not the engine's. Its `-o json` is what
`hobbit plot` draws.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from hobbit_py import _lib
from hobbit_py.live import MIB

Row = Mapping[str, Any]  # an object of llama-bench's JSON

_MEASURED = frozenset(
    "n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts model_type model_size "
    "model_n_params hobbit_cache hobbit_cache_bytes hobbit_hit_rate hobbit_bytes_per_token hobbit_stall_share".split()
)


def arguments(model: str, cache: str, options: Mapping[str, Any], more: Sequence[str], *, stock: bool) -> list[str]:
    """The command line. `cache` and the values of `options` may be lists with commas; `stock` puts "off" first."""
    sizes = [size.strip() for size in cache.split(",") if size.strip()]
    if stock and "off" not in sizes:
        sizes.insert(0, "off")
    command = [str(_lib.program("llama-bench")), "-m", model, "--hobbit-cache", ",".join(sizes)]
    for name, value in options.items():
        command += [_lib.OPTIONS[name].flag, _lib.option_text(value)]
    return [*command, *more]


def rows_of(command: Sequence[str]) -> Iterator[Row]:
    """Runs llama-bench and yields its rows as they are measured; its messages go to stderr.

    Raises:
        SystemExit: it failed, and said why; with its exit code.
    """
    with subprocess.Popen([*command, "-o", "jsonl"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):  # else it is the usage
                    yield json.loads(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)


def measurement(row: Row) -> str:
    """As llama-bench calls it: pp512, tg128, pp512+tg128, with @ d4096 behind."""
    parts = [f"{name}{row[key]}" for name, key in (("pp", "n_prompt"), ("tg", "n_gen")) if row[key]]
    return "+".join(parts) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def is_stock(row: Row) -> bool:
    return row.get("hobbit_cache") in (None, "off")


def varying(rows: Sequence[Row]) -> list[str]:
    """Parameters that are not the same in all rows; the engine's, in all rows with a cache."""

    def differs(name: str) -> bool:
        among = [row for row in rows if not (name.startswith("hobbit_") and is_stock(row))]
        return len({str(row[name]) for row in among}) > 1

    return [name for name in rows[0] if name not in _MEASURED and differs(name)]


def stock_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the same measurement without a cache."""

    def key(r: Row) -> list[Any]:
        names = [name for name in varying(rows) if not name.startswith("hobbit_")]
        return [measurement(r), *(r[name] for name in names)]

    return next((r for r in rows if is_stock(r) and key(r) == key(row)), None)


def table(rows: Sequence[Row]) -> Table:
    """Speed as llama-bench prints it, against stock, and what the cache did in the timed runs."""
    shown = Table(box=None, pad_edge=False)
    columns = ("cache", *varying(rows), "test", "tok/s", "x stock", "hit rate", "MiB/token", "stalled")
    for name in columns:
        numbers = name in ("tok/s", "x stock", "hit rate", "MiB/token", "stalled")
        shown.add_column(name.removeprefix("hobbit_"), justify="right" if numbers else "left")
    for row in rows:
        stock = stock_of(row, rows)

        def measured(name: str, unit: float, text: str, row: Row = row) -> str:
            value = row.get(name)
            return "" if value is None else text.format(value * unit)

        shown.add_row(
            "stock" if is_stock(row) else str(row["hobbit_cache"]),
            *(str(row[name]) for name in varying(rows)),
            measurement(row),
            f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
            f"{row['avg_ts'] / stock['avg_ts']:.2f}" if stock and not is_stock(row) else "",
            measured("hobbit_hit_rate", 100, "{:.1f} %"),
            measured("hobbit_bytes_per_token", 1 / MIB, "{:.2f}"),
            measured("hobbit_stall_share", 100, "{:.1f} %"),
        )
    return shown
