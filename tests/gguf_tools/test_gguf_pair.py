"""pair, merge and verify on models of every kind that people have."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_models import (
    BOOL,
    I32,
    STR,
    U16,
    U32,
    Gguf,
    Moe,
    Tensor,
    imatrix_gguf,
    imatrix_legacy,
    pack,
    read_back,
    split,
    unpack,
)

from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.inspect import inspect
from gguf_tools.merge import MergeResult, plan_merge, run_merge
from gguf_tools.model import open_model
from gguf_tools.pair import PairOptions, PairPlan, PairResult, plan_pair, run_pair
from gguf_tools.pairfile import open_pair
from gguf_tools.verify import verify


def make_pair(model: Path, folder: Path, **options: object) -> tuple[PairPlan, PairResult]:
    plan = plan_pair(PairOptions(model=model, folder=folder, **options))  # type: ignore[arg-type]
    try:
        return plan, run_pair(plan)
    finally:
        plan.close()


def make_merge(base: Path, output: Path, experts: str = "high", **options: object) -> MergeResult:
    plan = plan_merge(base, output, experts, **options)  # type: ignore[arg-type]
    try:
        return run_merge(plan)
    finally:
        plan.close()


def base_of(folder: Path) -> Path:
    (path,) = folder.glob("*.base.gguf")
    return path


KINDS = {
    "plain": Moe(),
    "f16": Moe(type="F16"),
    "bf16": Moe(type="BF16"),
    "q8_0": Moe(type="Q8_0"),
    "q4_k": Moe(type="Q4_K", n_embd=256, n_ff=256),
    "gpt-oss": Moe(arch="gpt-oss", type="MXFP4", biases=True),
    "nvfp4": Moe(type="NVFP4", n_ff=64, odd_names=True),
    "fused-gate-up": Moe(fused=True, type="F16"),
    "no-gate": Moe(arch="nemotron_h_moe", gated=False),
    "shared": Moe(arch="deepseek2", shared=True, dense_first=True, n_layer=3),
    "arctic-and-chunked": Moe(arch="grovemoe", odd_names=True),
    "mixed-layers": Moe(type_of=lambda i, role: "Q8_0" if role == "down" or i == 0 else "Q4_0"),
    "one-expert": Moe(n_expert=1, n_used=1),
    "many-experts": Moe(n_expert=896, n_embd=32, n_ff=32, n_layer=1),
    "nextn": Moe(nextn=True, kv=[("qwen3moe.nextn_predict_layers", U32, 1)]),
    "used-count-array": Moe(n_layer=2, kv=[("qwen3moe.expert_used_count", 9, (U32, [2, 1]))]),
    "odd-alignment": Moe(type="F16"),
}


def build(kind: str) -> Gguf:
    model = KINDS[kind].build()
    if kind == "used-count-array":
        used = model.kv.pop()
        model = model.with_kv(used)
    if kind == "odd-alignment":
        model.alignment = 256
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_keep_pair_merges_back_byte_for_byte(kind: str, tmp_path: Path) -> None:
    source = build(kind).write(tmp_path / "m.gguf")
    _, result = make_pair(source, tmp_path / "out", high="keep", low=("q4_0",) if kind != "mixed-layers" else ("q2_k",))
    merged = make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf")
    assert merged.identical
    assert (tmp_path / "merged.gguf").read_bytes() == source.read_bytes()
    assert verify(base_of(tmp_path / "out")).ok
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in result.outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_base_holds_everything_but_routed_experts(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    make_pair(model.write(tmp_path / "m.gguf"), tmp_path / "out", high="keep", low=("q2_k",))
    base = read_back(base_of(tmp_path / "out"))
    roles = {f"ffn_{r}_exps.weight" for r in ("gate", "up", "down", "gate_up")}
    expected = {t.name: t for t in model.tensors if t.name.split(".", 2)[-1] not in roles}
    assert base == expected


def test_low_copy_is_what_ggml_quantises(tmp_path: Path) -> None:
    moe = Moe(n_embd=256, n_ff=256)
    make_pair(moe.build().write(tmp_path / "m.gguf"), tmp_path / "out", low=("q4_0", "Q2_K", "q3_k", "mxfp4"))
    for label in ("Q4_0", "Q2_K", "Q3_K", "MXFP4"):
        stored = read_back(tmp_path / "out" / f"m.experts-{label}.gguf")
        for layer in range(moe.n_layer):
            for role, ne0, ne1 in moe.roles():
                t = stored[f"blk.{layer}.ffn_{role}_exps.weight"]
                assert (t.type, t.ne) == (label, (ne0, ne1, moe.n_expert))
                assert t.data == pack(moe.expert_values(layer, role, ne0, ne1), label)


def test_high_defaults_to_f16_for_f32_and_keep_otherwise(tmp_path: Path) -> None:
    plan, _ = make_pair(Moe().build().write(tmp_path / "a.gguf"), tmp_path / "a")
    assert plan.files[0].label == "F16" and not plan.files[0].kept
    plan, _ = make_pair(Moe(type="BF16").build().write(tmp_path / "b.gguf"), tmp_path / "b")
    assert plan.files[0].label == "BF16" and plan.files[0].kept


def test_quantised_source_is_never_stored_larger(tmp_path: Path) -> None:
    moe = Moe(type="MXFP4", arch="gpt-oss", biases=True)
    source = moe.build()
    plan, _ = make_pair(source.write(tmp_path / "m.gguf"), tmp_path / "out", high="f16", low=("q8_0",), name="x")
    for f in plan.files:
        for t in read_back(f.path).values():
            assert t == source.tensor(t.name)  # MXFP4 blocks passed through, bit for bit
    assert {c.kind for _, _, c in plan.fallbacks} == {"kept"}


def test_legacy_experts_are_fused_and_reported(tmp_path: Path) -> None:
    modern, legacy = Moe(type="F16"), Moe(type="F16", legacy=True)
    make_pair(legacy.build().write(tmp_path / "old.gguf"), tmp_path / "out", high="keep")
    result = make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf")
    assert not result.identical
    assert any("24 per-expert tensors become 6 fused ones" in d for d in result.differences)
    merged = read_back(tmp_path / "merged.gguf")
    for t in modern.build().tensors:
        if "_exps" in t.name:
            assert merged[t.name] == t


def test_legacy_experts_of_unequal_type_fall_back_to_f16(tmp_path: Path) -> None:
    moe = Moe(legacy=True, legacy_type_of=lambda e: "Q8_0" if e else "F16")
    source = moe.build().write(tmp_path / "old.gguf")
    plan, _ = make_pair(source, tmp_path / "out", high="keep")
    assert {c.type.name for _, _, c in plan.fallbacks} == {"F16"}
    stored = read_back(plan.files[0].path)["blk.0.ffn_up_exps.weight"]
    values = moe.expert_values(0, "up", 64, 32)
    expected = np.concatenate(
        [unpack(pack(v, "Q8_0" if e else "F16"), "Q8_0" if e else "F16") for e, v in enumerate(values)]
    )
    assert np.array_equal(unpack(stored.data, "F16"), expected.astype(np.float16).astype(np.float32))
    with pytest.raises(ToolError, match="unequal types"):
        plan_pair(PairOptions(source, tmp_path / "x", high="keep", no_fallback=True))


def test_missing_legacy_expert_is_named(tmp_path: Path) -> None:
    model = Moe(legacy=True).build()
    model.tensors = [t for t in model.tensors if t.name != "blk.1.ffn_down.2.weight"]
    with pytest.raises(ToolError, match=r"blk\.1\.ffn_down\.2\.weight.*expert 2 of 4 is missing"):
        plan_pair(PairOptions(model.write(tmp_path / "m.gguf"), tmp_path / "out"))


@pytest.mark.parametrize("start", [0, 1, 2])
def test_sharded_model_starts_from_any_shard(start: int, tmp_path: Path) -> None:
    model = Moe(type="F16").build()
    shards = split(model, tmp_path / "in-00001-of-00009.d", "m", 3)
    plan, _ = make_pair(shards[start], tmp_path / "out", high="keep")
    assert plan.stem == "m"
    result = make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf")
    assert any("3 shards become one file" in d for d in result.differences)
    assert (tmp_path / "merged.gguf").read_bytes() == model.to_bytes()  # as before llama-gguf-split


def test_missing_shard_is_named(tmp_path: Path) -> None:
    shards = split(Moe().build(), tmp_path, "m", 3)
    shards[1].unlink()
    with pytest.raises(ToolError, match=r"missing: m-00002-of-00003\.gguf"):
        open_model(shards[2])


def test_shard_of_another_set_is_refused(tmp_path: Path) -> None:
    shards = split(Moe().build(), tmp_path, "m", 3)
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(ToolError, match=r"split\.no is 2, expected 1"):
        open_model(shards[0])


def test_renamed_shard_is_refused(tmp_path: Path) -> None:
    shards = split(Moe().build(), tmp_path, "m", 2)
    renamed = shards[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ToolError, match=r"shard 1 of 2, but its name does not end in -00001-of-00002"):
        open_model(renamed)


def test_stale_split_keys_are_ignored_and_dropped(tmp_path: Path) -> None:
    model = Moe(type="F16").build()
    stale = model.with_kv(
        ("split.no", U16, 0), ("split.count", U16, 4), ("split.tensors.count", I32, len(model.tensors))
    )
    plan, _ = make_pair(stale.write(tmp_path / "m.gguf"), tmp_path / "out", high="keep")
    assert "stale split.*" in plan.notes[0]
    result = make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf")
    assert result.differences == ["split.* keys are left out"]
    assert (tmp_path / "merged.gguf").read_bytes() == model.to_bytes()


def test_name_that_looks_like_a_shard_is_just_a_name(tmp_path: Path) -> None:
    source = Moe().build().write(tmp_path / "m-00001-of-00004.gguf")
    plan, _ = make_pair(source, tmp_path / "out")
    assert plan.base_path and plan.base_path.name == "m-00001-of-00004.base.gguf"


def test_shards_joined_end_to_end_are_refused(tmp_path: Path) -> None:
    shards = split(Moe().build(), tmp_path, "m", 2)
    joined = tmp_path / "m.gguf"
    joined.write_bytes(b"".join(p.read_bytes() for p in shards))
    with pytest.raises(ToolError, match="second GGUF file from byte"):
        open_model(joined)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"version": 2}, "GGUF version 2 becomes 3"),
        ({"padding_byte": b"\1"}, "padding"),
        ({"extra_dims": 1}, "trailing dimensions"),
        ({"trailing": b"signature"}, "9 bytes after the last tensor are left out"),
    ],
)
def test_what_a_merge_cannot_give_back_is_said(change: dict[str, object], difference: str, tmp_path: Path) -> None:
    model = replace(Moe(type="F16", n_embd=32, n_expert=3).build(), **change)  # type: ignore[arg-type]
    model.tensors.insert(0, Tensor("odd.weight", "F32", (3,), b"\0" * 12))
    source = model.write(tmp_path / "m.gguf")
    plan, _ = make_pair(source, tmp_path / "out", high="keep")
    assert any(difference in note for note in plan.source_notes)
    result = make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf")
    assert not result.identical and any(difference in d for d in result.differences)
    assert {t.name: t.data for t in read_back(tmp_path / "merged.gguf").values()} == {
        t.name: t.data for t in model.tensors
    }


def test_file_without_padding_after_the_last_tensor_comes_back(tmp_path: Path) -> None:
    model = Moe(type="F16").build()
    model.tensors.append(Tensor("odd.weight", "F32", (3,), b"\0" * 12))
    model.final_padding = False
    source = model.write(tmp_path / "m.gguf")
    make_pair(source, tmp_path / "out", high="keep")
    assert make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf").identical
    assert (tmp_path / "merged.gguf").read_bytes() == source.read_bytes()


def test_merge_of_low_experts_is_an_ordinary_file(tmp_path: Path) -> None:
    moe = Moe(n_embd=256, n_ff=256)
    make_pair(moe.build().write(tmp_path / "m.gguf"), tmp_path / "out", low=("q4_0", "q2_k"))
    result = make_merge(base_of(tmp_path / "out"), tmp_path / "low.gguf", "q2_k")
    assert any("file_type becomes 10" in d for d in result.differences)
    with open_model(tmp_path / "low.gguf") as merged:
        assert {e.type.name for e in merged.experts if e.type} == {"Q2_K"}
        assert not [key for key in merged.context.keys() if key.startswith("hobbit.")]
        assert merged.context.get("general.file_type") == 10


# ------------------------------------------------------------------------------------------------- types and fallbacks


def test_rows_that_do_not_fit_fall_back_as_upstream_and_are_listed(tmp_path: Path) -> None:
    source = Moe(n_embd=64, n_ff=32).build().write(tmp_path / "m.gguf")
    expected = {
        "q2_k": "Q4_0",
        "q3_k": "Q4_0",
        "q4_k": "Q5_0",
        "q5_k": "Q5_1",
        "q6_k": "Q8_0",
        "iq4_xs": "IQ4_NL",
        "iq3_s": "IQ4_NL",
    }
    for i, (wanted, stored) in enumerate(expected.items()):
        plan, _ = make_pair(source, tmp_path / str(i), low=(wanted,))
        assert [c.type.name for _, _, c in plan.fallbacks] == [stored] * 6
        assert {t.type for t in read_back(plan.files[1].path).values()} == {stored}
        with pytest.raises(ToolError, match="6 tensors would not be stored as asked") as error:
            plan_pair(PairOptions(source, tmp_path / "no", low=(wanted,), no_fallback=True))
        assert error.value.code == ExitCode.UNSUPPORTED
    assert not (tmp_path / "no").exists()


def test_rows_that_fit_no_block_become_f16(tmp_path: Path) -> None:
    source = Moe(n_embd=48, n_ff=16).build().write(tmp_path / "m.gguf")
    plan, _ = make_pair(source, tmp_path / "out", low=("q4_k",))
    assert {c.type.name for _, _, c in plan.fallbacks} == {"F16"}


@pytest.mark.parametrize("kind", ["iq2_xxs", "iq2_xs", "iq1_s", "iq1_m", "iq2_s", "iq3_xxs"])
def test_types_that_need_an_imatrix_are_refused_without(kind: str, tmp_path: Path) -> None:
    source = Moe(n_embd=256, n_ff=256).build().write(tmp_path / "m.gguf")
    with pytest.raises(ToolError, match="needs an importance matrix") as error:
        plan_pair(PairOptions(source, tmp_path / "out", low=(kind,)))
    assert error.value.tensor == "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize("kind", ["q8_1", "i8", "f64", "f32", "nonsense", "", "q4_0\n"])
def test_types_that_cannot_be_low_are_usage_errors(kind: str, tmp_path: Path) -> None:
    source = Moe().build().write(tmp_path / "m.gguf")
    with pytest.raises(ToolError) as error:
        plan_pair(PairOptions(source, tmp_path / "out", low=(kind,)))
    assert error.value.code == ExitCode.USAGE


def imatrix_for(moe: Moe, unrouted: int | None = None) -> Gguf:
    rng = np.random.default_rng(7)
    sums = {}
    for layer in range(moe.n_layer):
        for role, ne0, _ in moe.roles():
            counts = np.full(moe.n_expert, 5, np.float32)
            if unrouted is not None:
                counts[unrouted] = 0
            values = rng.random((moe.n_expert, ne0), dtype=np.float32) * counts[:, None]
            sums[f"blk.{layer}.ffn_{role}_exps.weight"] = (values, counts)
    return imatrix_gguf(sums)


def test_imatrix_weights_each_expert_with_its_own_data(tmp_path: Path) -> None:
    moe = Moe(n_embd=256, n_ff=256, n_layer=1)
    imatrix = imatrix_for(moe, unrouted=2)
    path = imatrix.write(tmp_path / "imatrix.gguf")
    plan, _ = make_pair(moe.build().write(tmp_path / "m.gguf"), tmp_path / "out", low=("iq2_xxs",), imatrix=path)
    assert any("never routed" in note and note.endswith("experts 2") for note in plan.notes)
    from gguf_tools import ggml

    t = ggml.type_by_name("IQ2_XXS")
    stored = read_back(plan.files[1].path)
    for role, ne0, ne1 in moe.roles():
        sums = imatrix.tensor(f"blk.0.ffn_{role}_exps.weight.in_sum2")
        weights = np.frombuffer(sums.data, np.float32).reshape(4, ne0) / np.float32(5)
        weights[2] = 1
        expected = b""
        for e, values in enumerate(moe.expert_values(0, role, ne0, ne1)):
            out = np.empty(ne1 * t.row_bytes(ne0), np.uint8)
            ggml.quantize(t, np.ascontiguousarray(values).reshape(-1), out, ne0, weights[e].copy())
            expected += out.tobytes()
        assert stored[f"blk.0.ffn_{role}_exps.weight"].data == expected


def test_legacy_imatrix_and_legacy_names_are_read(tmp_path: Path) -> None:
    moe = Moe(n_embd=256, n_ff=256, n_layer=1)
    rng = np.random.default_rng(7)
    new = {f"blk.0.ffn_{role}_exps.weight": rng.random((4, ne0), dtype=np.float32) for role, ne0, _ in moe.roles()}
    fused = tmp_path / "a.dat"
    fused.write_bytes(imatrix_legacy({name: (v.reshape(-1) * 4, 4) for name, v in new.items()}))
    single = tmp_path / "b.dat"
    parts = {name.replace("_exps.", f".{e}."): (v[e] * 2, 2) for name, v in new.items() for e in range(4)}
    single.write_bytes(imatrix_legacy(parts))
    source = moe.build().write(tmp_path / "m.gguf")
    make_pair(source, tmp_path / "a", low=("iq2_xs",), imatrix=fused)
    make_pair(source, tmp_path / "b", low=("iq2_xs",), imatrix=single)
    low = "m.experts-IQ2_XS.gguf"
    assert {n: t.data for n, t in read_back(tmp_path / "a" / low).items()} == {
        n: t.data for n, t in read_back(tmp_path / "b" / low).items()
    }


def test_imatrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = imatrix_for(Moe(n_embd=256, n_ff=256, n_expert=8)).write(tmp_path / "imatrix.gguf")
    source = Moe(n_embd=256, n_ff=256).build().write(tmp_path / "m.gguf")
    with pytest.raises(ToolError, match=r"2048 values, the tensor needs 256 \* 4"):
        plan_pair(PairOptions(source, tmp_path / "out", imatrix=path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_value_that_is_not_finite_is_named(value: float, tmp_path: Path) -> None:
    model = Moe().build()
    i = next(i for i, t in enumerate(model.tensors) if t.name == "blk.1.ffn_up_exps.weight")
    values = np.frombuffer(model.tensors[i].data, np.float32).copy()
    values[3 * 64 * 32 + 5 * 64 + 1] = value
    model.tensors[i] = replace(model.tensors[i], data=values.tobytes())
    with pytest.raises(ToolError, match=r"blk\.1\.ffn_up_exps\.weight.*expert 3, row 5"):
        make_pair(model.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_values_beyond_f16_are_refused_for_f16_and_fine_for_bf16(tmp_path: Path) -> None:
    model = Moe().build()
    i = next(i for i, t in enumerate(model.tensors) if t.name == "blk.0.ffn_up_exps.weight")
    values = np.frombuffer(model.tensors[i].data, np.float32).copy()
    values[0] = 1e5
    model.tensors[i] = replace(model.tensors[i], data=values.tobytes())
    source = model.write(tmp_path / "m.gguf")
    with pytest.raises(ToolError, match="F16 ends at 65504"):
        make_pair(source, tmp_path / "out", high="f16", low=("bf16",))
    make_pair(source, tmp_path / "out2", high="bf16", low=("q4_0",))


# ---------------------------------------------------------------------------------------------------- pair's metadata


def test_base_names_its_experts_and_carries_id_hash_sizes_and_checksums(tmp_path: Path) -> None:
    model = Moe().build()
    make_pair(model.write(tmp_path / "m.gguf"), tmp_path / "out", low=("q4_0", "q8_0"))
    with open_model(base_of(tmp_path / "out")) as base:
        ctx = base.context
        assert ctx.get("hobbit.pair.version") == 1
        assert ctx.get("hobbit.pair.high") == "m.experts-F16.gguf"
        assert ctx.get("hobbit.pair.low") == ["m.experts-Q4_0.gguf", "m.experts-Q8_0.gguf"]
        routers = b"".join(model.tensor(f"blk.{i}.ffn_gate_inp.weight").data for i in range(2))
        assert ctx.get("hobbit.pair.router_hash") == hashlib.sha256(routers).hexdigest()
        assert ctx.get("hobbit.pair.high_size") == (tmp_path / "out" / "m.experts-F16.gguf").stat().st_size
        names = [t.name for t in model.tensors]
        assert ctx.get("hobbit.pair.tensors") == names
        sums = dict(zip(names, ctx.get("hobbit.pair.sha256"), strict=True))
        stored = {**read_back(base_of(tmp_path / "out")), **read_back(tmp_path / "out" / "m.experts-F16.gguf")}
        assert sums == {name: hashlib.sha256(stored[name].data).hexdigest() for name in names}
        tokens = dict((kv[0], kv[2]) for kv in model.kv)["tokenizer.ggml.tokens"][1]
        assert tokens[-1].encode() in base.files[0].header.raw  # a zero byte inside a string survives
    for label in ("F16", "Q4_0", "Q8_0"):
        with open_model(tmp_path / "out" / f"m.experts-{label}.gguf") as experts:
            assert experts.context.get("hobbit.pair.id") == ctx.get("hobbit.pair.id")
            assert experts.context.alignment == 4096
            assert [t.offset % 4096 for _, t in experts.tensors] == [0] * 6


def test_router_hash_follows_layers_by_number_not_by_position(tmp_path: Path) -> None:
    model = Moe(n_layer=11).build()
    a = open_model(model.write(tmp_path / "a.gguf"))
    model.tensors.reverse()
    b = open_model(model.write(tmp_path / "b.gguf"))
    assert a.router_hash == b.router_hash
    a.close()
    b.close()


@pytest.mark.parametrize(
    "name", ["/etc/x.gguf", "../x.gguf", "..", ".", "", "a/b.gguf", "a\\b.gguf", "C:x.gguf", "a\nb"]
)
def test_expert_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    make_pair(Moe().build().write(tmp_path / "m.gguf"), tmp_path / "out")
    rewrite_key(base_of(tmp_path / "out"), "hobbit.pair.high", name)
    with pytest.raises(ToolError, match="not a plain file name"):
        open_pair(base_of(tmp_path / "out"))


def rewrite_key(path: Path, key: str, value: str) -> None:
    """Change one string of a file's metadata."""
    from gguf_tools.ggml import GgufContext
    from gguf_tools.header import read_header

    header = read_header(path)
    data = path.read_bytes()[header.data_offset :]
    with GgufContext.from_header(header.raw) as ctx:
        ctx.set_str(key, value)
        path.write_bytes(ctx.meta_bytes() + data)


def test_experts_of_another_pair_are_refused(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_pair(Moe(seed=seed).build().write(tmp_path / f"{seed}" / "m.gguf"), tmp_path / f"out{seed}")
    low = "m.experts-Q4_0.gguf"
    (tmp_path / "out1" / low).write_bytes((tmp_path / "out2" / low).read_bytes())
    with pytest.raises(ToolError, match="pair id is") as error:
        open_pair(base_of(tmp_path / "out1"))
    assert error.value.code == ExitCode.MISMATCH


def test_the_same_source_gives_the_same_files(tmp_path: Path) -> None:
    source = Moe().build().write(tmp_path / "m.gguf")
    make_pair(source, tmp_path / "a", workers=1)
    make_pair(source, tmp_path / "b", workers=3)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_low_only_belongs_to_the_model_it_was_made_from(tmp_path: Path) -> None:
    source = Moe().build().write(tmp_path / "m.gguf")
    plan, _ = make_pair(source, tmp_path / "out", low_only=True)
    (low,) = (tmp_path / "out").iterdir()
    assert low == plan.files[0].path
    routers = {n: t for n, t in read_back(low).items() if "gate_inp" in n}
    assert routers == {n: t for n, t in read_back(source).items() if "gate_inp" in n}  # they prove what it belongs to
    report = verify(low, model=source)
    assert report.ok and not report.notes and len(report.errors) == 6
    other = Moe(seed=2).build().write(tmp_path / "other.gguf")
    assert any("other routers" in p for p in verify(low, model=other).problems)
    requantised = Moe(type="Q8_0").build().write(tmp_path / "q8.gguf")
    report = verify(low, model=requantised)
    assert report.ok and "another file of this model" in report.notes[0]
    assert not verify(low).problems


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify_names_the_damaged_tensor_and_expert(tmp_path: Path) -> None:
    make_pair(Moe().build().write(tmp_path / "m.gguf"), tmp_path / "out", high="bf16")
    path = tmp_path / "out" / "m.experts-BF16.gguf"
    with open_model(path) as model:
        e = next(e for e in model.experts if e.name == "blk.1.ffn_down_exps.weight")
        start, size = e.segments[0].offset, e.expert_bytes(e.segments[0].type)
    data = bytearray(path.read_bytes())
    data[start + 2 * size : start + 3 * size] = bytes(size)
    path.write_bytes(data)
    report = verify(base_of(tmp_path / "out"))
    assert not report.ok
    assert any("blk.1.ffn_down_exps.weight" in p and "checksum" in p for p in report.problems)
    assert any("blk.1.ffn_down_exps.weight" in p and "expert 2 differs" in p for p in report.problems)
    assert verify(base_of(tmp_path / "out"), quick=True).ok
    with pytest.raises(ToolError, match=r"blk\.1\.ffn_down_exps\.weight.*damaged"):
        make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf")
    assert not (tmp_path / "merged.gguf").exists() and not list(tmp_path.glob("*.part"))


def test_verify_of_an_ordinary_file_finds_values_that_are_not_finite(tmp_path: Path) -> None:
    model = Moe().build()
    assert verify(model.write(tmp_path / "good.gguf")).ok
    i = next(i for i, t in enumerate(model.tensors) if t.name == "output_norm.weight")
    model.tensors[i] = replace(model.tensors[i], data=np.full(64, np.nan, np.float32).tobytes())
    (problem,) = verify(model.write(tmp_path / "bad.gguf")).problems
    assert "output_norm.weight" in problem and "row 0" in problem


def test_verify_reports_the_error_of_each_tensor(tmp_path: Path) -> None:
    moe = Moe()
    make_pair(moe.build().write(tmp_path / "m.gguf"), tmp_path / "out", high="f16", low=("q4_0",))
    report = verify(base_of(tmp_path / "out"))
    for e in report.errors:
        layer, role = int(e.tensor.split(".")[1]), e.tensor.split("_")[1]
        ne0, ne1 = next((a, b) for r, a, b in moe.roles() if r == role)
        values = moe.expert_values(layer, role, ne0, ne1)
        high = values.astype(np.float16).astype(np.float64)
        low = unpack(pack(values, "Q4_0"), "Q4_0").reshape(values.shape)
        per = [np.linalg.norm(h - x) / np.linalg.norm(h) for h, x in zip(high, low, strict=True)]
        assert e.worst_expert == int(np.argmax(per))
        assert e.worst_error == pytest.approx(max(per), rel=1e-4)
        assert e.error == pytest.approx(np.linalg.norm(high - low) / np.linalg.norm(high), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_dense_models_are_refused_politely(tmp_path: Path) -> None:
    model = Moe(n_layer=1, dense_first=True).build()
    with pytest.raises(ToolError, match="is a dense model") as error:
        plan_pair(PairOptions(model.write(tmp_path / "m.gguf"), tmp_path / "out"))
    assert error.value.code == ExitCode.UNSUPPORTED
    assert not (tmp_path / "out").exists()
    assert inspect(tmp_path / "m.gguf").layers == []


def test_model_without_router_is_refused(tmp_path: Path) -> None:
    model = Moe().build()
    model.tensors = [t for t in model.tensors if "gate_inp" not in t.name]
    with pytest.raises(ToolError, match="no router"):
        plan_pair(PairOptions(model.write(tmp_path / "m.gguf"), tmp_path / "out"))


def test_parts_of_a_pair_cannot_be_paired_again(tmp_path: Path) -> None:
    make_pair(Moe().build().write(tmp_path / "m.gguf"), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        with pytest.raises(ToolError):
            plan_pair(PairOptions(path, tmp_path / "again"))


@pytest.mark.parametrize("drop", ["gate", "up", "down"])
def test_layer_that_lacks_a_role_is_refused(drop: str, tmp_path: Path) -> None:
    model = Moe().build()
    model.tensors = [t for t in model.tensors if t.name != f"blk.1.ffn_{drop}_exps.weight"]
    path = model.write(tmp_path / "m.gguf")
    if drop == "gate":  # a layer without gate is sound (some architectures have none)
        open_model(path).close()
        return
    with pytest.raises(ToolError, match="layer 1 has experts for"):
        plan_pair(PairOptions(path, tmp_path / "out"))


def test_pair_keys_do_not_leak_into_a_merge(tmp_path: Path) -> None:
    model = Moe(type="F16").build().with_kv(("my.key", STR, "x"), ("my.flag", BOOL, True))
    make_pair(model.write(tmp_path / "m.gguf"), tmp_path / "out", high="keep")
    assert make_merge(base_of(tmp_path / "out"), tmp_path / "merged.gguf").identical
