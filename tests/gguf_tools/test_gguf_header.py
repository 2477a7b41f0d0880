"""The header check names what is wrong, and agrees with ggml on what is right."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_models import ARR, ROOT, STR, U32, Gguf, Moe, Tensor

from gguf_tools import ggml
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.header import read_header

VOCABULARIES = sorted((ROOT / "build" / "llama.cpp-src" / "models").glob("ggml-vocab-*.gguf"))


def refuse(path: Path, match: str, code: ExitCode = ExitCode.MALFORMED) -> None:
    with pytest.raises(ToolError, match=match) as error:
        read_header(path)
    assert error.value.code == code
    assert str(error.value).isprintable() and path.name in str(error.value)


def patched(path: Path, at: int, data: bytes) -> Path:
    raw = bytearray(Moe().build().to_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)
    return path


def test_header_agrees_with_ggml(tmp_path: Path) -> None:
    path = Moe(type="Q8_0", biases=True).build().write(tmp_path / "m.gguf")
    header = read_header(path)
    with ggml.GgufContext.from_header(header.raw) as ctx:
        assert ctx.meta_bytes() == header.raw
        assert (ctx.data_offset, ctx.alignment) == (header.data_offset, header.alignment)
        for i, t in enumerate(header.tensors):
            name, kind, ne, offset, size = ctx.tensor_info(i)
            assert (name, kind, size) == (t.name, t.type.index, t.size)
            assert ne == t.ne + (1,) * (4 - len(t.ne)) and offset + header.data_offset == t.offset


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_real_vocabularies_are_accepted_and_written_back(path: Path) -> None:
    header = read_header(path)
    with ggml.GgufContext.from_header(header.raw) as ctx:
        assert ctx.meta_bytes()[: header.kv_end] == header.raw[: header.kv_end]


def test_there_are_real_vocabularies() -> None:
    assert len(VOCABULARIES) >= 15, "the prepared llama.cpp source is missing: make build"


def test_number_of_types_is_that_of_the_library() -> None:
    def parse(kind: int) -> ggml.GgufContext:
        raw = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"x"
        raw += struct.pack("<IqiQ", 1, 0, kind, 0)
        return ggml.GgufContext.from_header(raw + b"\0" * (-len(raw) % 32))

    parse(ggml.N_TYPES - 1).close()
    with pytest.raises(ToolError, match="invalid ggml type"):
        parse(ggml.N_TYPES)


@pytest.mark.parametrize(
    ("alignment", "match"), [(0, "is 0, not a power"), (3, "is 3"), (1 << 21, "not a power of two up to")]
)
def test_alignment_is_checked(alignment: int, match: str, tmp_path: Path) -> None:
    model = Moe().build().with_kv(("general.alignment", U32, alignment))
    refuse(model.write(tmp_path / "m.gguf"), match)


def test_alignment_of_another_type_is_refused(tmp_path: Path) -> None:
    refuse(
        Moe().build().with_kv(("general.alignment", STR, "32")).write(tmp_path / "m.gguf"),
        "must be of type u32, not str",
    )


def test_huge_counts_are_refused(tmp_path: Path) -> None:
    refuse(patched(tmp_path / "a.gguf", 8, struct.pack("<Q", 1 << 60)), "announces 1152921504606846976 tensors")
    refuse(patched(tmp_path / "b.gguf", 16, struct.pack("<Q", 1 << 60)), "announces 1152921504606846976 keys")


def test_string_past_the_end_is_refused(tmp_path: Path) -> None:
    refuse(patched(tmp_path / "a.gguf", 24, struct.pack("<Q", 1 << 40)), "key 0: the key is 1099511627776 bytes long")
    raw = Gguf([("k", ARR, (STR, ["a", "b"]))], []).to_bytes().rstrip(b"\0")
    path = tmp_path / "b.gguf"
    path.write_bytes(raw[:-9] + struct.pack("<Q", 1 << 30) + b"b")
    refuse(path, r"key 'k': needs 1073741824 bytes at \d+, but the file ends")


def test_arrays_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    for kind, n in ((0, 1 << 30), (12, 1 << 61), (STR, 1 << 32)):
        raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<iiQ", ARR, kind, n)
        path = tmp_path / "m.gguf"
        path.write_bytes(raw + b"\0" * 64)
        refuse(path, "do not fit into the 64 bytes that follow")


def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    path = Gguf([("k", ARR, (ARR, []))], []).write(tmp_path / "m.gguf")
    refuse(path, "array of type 9")


def test_versions(tmp_path: Path) -> None:
    for version, match in ((0, "version 0"), (1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")):
        refuse(patched(tmp_path / "m.gguf", 4, struct.pack("<I", version)), match, ExitCode.UNSUPPORTED)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    refuse(path, "0 bytes long")
    path.write_bytes(b"\x80\0\0\0\0\0\0\0{" + b"x" * 100)
    refuse(path, "not with 'GGUF'")
    path.write_bytes(b"tjgg" + b"x" * 100)
    refuse(path, "pre-GGUF", ExitCode.UNSUPPORTED)


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "not a regular file")
    refuse(tmp_path / "none.gguf", "No such file", ExitCode.IO)
    with pytest.raises(ToolError, match="cannot open"):
        read_header(Path("a\0b"))


def test_truncated_file_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    model = Moe().build()
    raw = model.to_bytes()
    path = model.write(tmp_path / "m.gguf")
    for t in read_header(path).tensors:
        path.write_bytes(raw[: t.offset + t.size - 1])
        refuse(path, f"tensor '{t.name}': ends at byte {t.offset + t.size}.*truncated")


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (Tensor("x", "Q4_0", (48,), b"\0" * 27), "rows of 48 elements, not a multiple of Q4_0's block of 32"),
        (Tensor("x", "F32", (-1,), b""), "dimension of -1"),
        (Tensor("x", "F32", (1 << 40, 1 << 40), b""), "number of elements overflows"),
        (Tensor("x", "F32", (1, 1, 1, 1, 1), b"\0" * 4), "has 5 dimensions"),
        (Tensor("x" * 64, "F32", (1,), b"\0" * 4), "64 bytes long, not 1 to 63"),
        (Tensor("token_embd.weight", "F32", (1,), b"\0" * 4), "occurs twice"),
        (Tensor("a\0b", "F32", (1,), b"\0" * 4), "control characters"),
        (Tensor("x", "F32", (8,), b"\0" * 4), "ends at byte"),
    ],
)
def test_tensor_infos_are_checked(tensor: Tensor, match: str, tmp_path: Path) -> None:
    model = Moe().build()
    model.tensors.append(tensor)
    model.final_padding = False
    refuse(model.write(tmp_path / "m.gguf"), match)


def test_tensors_must_follow_each_other(tmp_path: Path) -> None:
    model = Moe().build()
    first = model.tensors[0]
    model.tensors[0] = replace(first, data=first.data + b"\0" * 32)
    refuse(model.write(tmp_path / "m.gguf"), "is at data offset 1056, expected 1024")


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    model = Moe().build()
    model.kv.append(model.kv[0])
    refuse(model.write(tmp_path / "m.gguf"), "key 'general.architecture': occurs twice")


def test_empty_arrays_and_zero_bytes_in_strings_survive_a_rewrite(tmp_path: Path) -> None:
    header = read_header(Moe().build().write(tmp_path / "m.gguf"))
    with ggml.GgufContext.from_header(header.metadata_only()) as ctx:
        assert ctx.get("tokenizer.ggml.merges") == []
        written = ctx.meta_bytes()
    assert header.raw[header.kv_start : header.kv_end] in written


def test_library_is_looked_for_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ggml.find_library()
    for variable in ("HOBBIT_GGML_LIB", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.delenv("HOBBIT_GGML_LIB", raising=False)
        monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
        (tmp_path / variable).mkdir()
        link = tmp_path / variable / real.name
        link.symlink_to(real)
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert ggml.find_library() == link
    monkeypatch.setattr(ggml, "library_folders", lambda: iter([tmp_path / "none"]))
    with pytest.raises(ToolError, match="HOBBIT_GGML_LIB") as error:
        ggml.find_library()
    assert error.value.code == ExitCode.LIBRARY
