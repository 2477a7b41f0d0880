"""Statistics as data: there and back, differences, rows; no model is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hobbit_models import example

from hobbit_py import CacheStats, Placement
from hobbit_py.stats import COUNTERS


def test_json_there_and_back(tmp_path: Path) -> None:
    stats = example()
    assert CacheStats.from_json(json.dumps(stats.to_dict())) == stats
    seen = dataclasses.replace(stats, resident=("012", "000", "222"))
    seen.save(tmp_path / "stats.json")
    assert CacheStats.load(tmp_path / "stats.json") == seen


def test_differences_count_and_states_stay() -> None:
    difference = example(3) - example(1)
    assert difference == example(2)
    assert difference.resident_high == 11
    with pytest.raises(ValueError, match="reset"):
        _ = example(1) - example(2)
    with pytest.raises(ValueError, match="different models"):
        _ = example(2) - example(1, layers=2)


def test_rates_of_nothing_are_zero() -> None:
    empty = CacheStats()
    assert empty.total.hit_rate == empty.decode_tokens_per_second == 0.0
    assert empty.total.mix == (0.0, 0.0, 0.0)
    assert example().decode_tokens_per_second == 2000.0


def test_rows_are_flat_and_complete() -> None:
    rows = example().rows()
    assert [row["block"] for row in rows] == [1, 2, 3]
    assert all(row.keys() == {"block", "hit_rate", *COUNTERS} for row in rows)
    assert rows[0]["hit_rate"] == 0.5


def test_they_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().total.hits = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "Expecting value"),
        ("[1, 2]", "JSON object"),
        ('{"some": "thing"}', "version, total and layers"),
        ('{"version": 99, "total": {}, "layers": []}', "version 99"),
        ('{"version": 1, "total": 5, "layers": []}', "stats.json"),
        ('{"version": 1, "total": {}, "layers": 3}', "stats.json"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "stats.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as error:
        CacheStats.load(path)
    assert str(path) in str(error.value)


def test_a_placement_reads_well() -> None:
    place = Placement.from_dict(
        {"arch": "qwen3moe", "n_layer": 6, "n_expert": 16, "n_expert_used": 4, "precision": "hobbit",
         "t1": 0.6, "t2": 0.9, "policy": "lru", "cache_bytes": 12 << 20, "sizing": "of 12.0 MiB allowed",
         "pools": [{"precision": "high", "file": "a.gguf", "type": "f16", "slots": 24, "slot_bytes": 1 << 19}]},
        unlike_llama_cli=("flash attention is off",),
    )  # fmt: skip
    text = str(place)
    for part in ("16 experts", "12.0 MiB", "24 of 96 experts fit", "a.gguf", "T1 0.6", "flash attention is off"):
        assert part in text
    assert json.loads(json.dumps(place.to_dict()))["pools"][0]["slots"] == 24
