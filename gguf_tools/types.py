"""Which type each expert tensor is stored as, and why it is not always the one that was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools import ggml
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.ggml import TensorType
from gguf_tools.model import ExpertTensor

HIGH_TYPES = ("f16", "bf16", "q8_0", "keep")

# What llama-quantize takes when a row is not a multiple of the wanted type's block.
_FALLBACK = {
    "IQ4_NL": ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
    "Q4_0": ("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"),
    "Q5_0": ("Q4_K",),
    "Q5_1": ("Q5_K",),
    "Q8_0": ("Q6_K",),
}
_FALLBACK_OF = {wanted: fallback for fallback, wanteds in _FALLBACK.items() for wanted in wanteds}

# ggml aborts on three of these without an imatrix; llama-quantize refuses all, since the result is garbage.
NEED_IMATRIX = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"})

# llama.h's LLAMA_FTYPE_* for a file whose tensors are mostly of one type.
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39,
    "Q1_0": 40, "Q2_0": 41,
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The type of one tensor in one file. `kind` is '' (as asked), 'kept' or 'fallback'; `same`: the source's bytes."""

    type: TensorType
    same: bool
    kind: str = ""
    reason: str = ""


def low_type(name: str) -> TensorType:
    """The type for a `--low` option."""
    t = ggml.type_by_name(name)
    if not ggml.can_quantize(t) or t.name == "F32":
        raise ToolError(f"{t.name} is not a type for experts", code=ExitCode.USAGE)
    return t


def choose(e: ExpertTensor, wanted: TensorType | None) -> Choice:
    """The type for tensor `e`; `wanted` None keeps the source's.

    A quantised source tensor is never stored larger than it is: the extra bytes would hold nothing. Rows that do not
    fit the block of the wanted type get what llama-quantize would take.
    """
    source = e.type

    def choice(t: TensorType, kind: str = "", reason: str = "") -> Choice:
        return Choice(t, source is not None and source.index == t.index, kind, reason)

    if wanted is None:
        if source is not None:
            return choice(source)
        names = ", ".join(sorted({s.type.name for s in e.segments}))
        return choice(ggml.type_by_name("F16"), "fallback", f"its experts have unequal types ({names})")
    ne0 = e.ne[0]
    result = choice(wanted)
    if ne0 % wanted.block:
        name = _FALLBACK_OF.get(wanted.name)
        if name is None and wanted.block > 32:
            raise ToolError(
                f"rows of {ne0} are not a multiple of {wanted.name}'s block of {wanted.block}, "
                "and there is no type to fall back to",
                tensor=e.name,
                code=ExitCode.UNSUPPORTED,
            )
        t = ggml.type_by_name(name or "F16")
        if ne0 % t.block:
            t = ggml.type_by_name("F16")
        result = choice(t, "fallback", f"rows of {ne0} are not a multiple of {wanted.name}'s block of {wanted.block}")
    if source is not None and source.is_quantized and source.row_bytes(ne0) <= result.type.row_bytes(ne0):
        if source.index == wanted.index:
            return choice(source)
        return choice(source, "kept", f"the source is {source.name}, no larger than {result.type.name}")
    for s in e.segments:
        if s.type.index != result.type.index and not ggml.can_dequantize(s.type):
            raise ToolError(f"ggml cannot expand {s.type.name}", tensor=s.name, code=ExitCode.UNSUPPORTED)
    return result
