"""Scalar types of the language and the rules by which arithmetic combines them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A scalar type. `kind` is `float`, `int` or `bool`; `bits` is the storage width."""

    name: str
    kind: str
    bits: int
    signed: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory."""
        return max(1, self.bits // 8)

    @property
    def compute(self) -> DType:
        """The type in which a value loaded from this storage type is held and computed with.

        f16 and bf16 widen to f32, integers below 32 bits to i32; the others compute as themselves.
        """
        if self.kind == "float" and self.bits < 32:
            return F32
        if self.kind == "int" and self.bits < 32:
            return I32
        return self

    def __str__(self) -> str:
        return self.name


F16 = DType("f16", "float", 16)
BF16 = DType("bf16", "float", 16)
F32 = DType("f32", "float", 32)
F64 = DType("f64", "float", 64)
I8 = DType("i8", "int", 8)
U8 = DType("u8", "int", 8, signed=False)
I16 = DType("i16", "int", 16)
I32 = DType("i32", "int", 32)
I64 = DType("i64", "int", 64)
BOOL = DType("bool", "bool", 8)

DTYPES: dict[str, DType] = {d.name: d for d in (F16, BF16, F32, F64, I8, U8, I16, I32, I64, BOOL)}

# What a dtype variable such as `T` may stand for when the kernel does not constrain it.
VARIABLE_DTYPES: tuple[DType, ...] = (F16, BF16, F32, F64)


def promote(a: DType, b: DType) -> DType:
    """The compute type of an arithmetic operation on two compute types.

    A float beats an integer, an integer beats a bool (which counts as i32); of two of a kind the wider wins.
    """
    rank = {"bool": 0, "int": 1, "float": 2}
    if a.kind != b.kind:
        wide = a if rank[a.kind] > rank[b.kind] else b
        return wide.compute
    if a.kind == "bool":
        return I32
    return (a if a.bits >= b.bits else b).compute
