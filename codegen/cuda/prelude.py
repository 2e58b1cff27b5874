"""Which helpers does a kernel need in front of it, and what do its packs look like?"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.cuda.text import compute_type
from kgen.codegen.templating import render
from kgen.dsl.dtypes import BF16, F16, DType

PRIMITIVES = frozenset(
    {
        "cvt_f32_f16", "cvt_f16_f32", "cvt_bf16_f32", "cvt_f16_f64", "cvt_bf16_f64", "cvt_f16x2_f32",
        "cvt_bf16x2_f32", "exp2_approx", "prefetch_l2", "store_streaming",
        "load_staying", "load_staying 16", "load_staying 8", "load_staying 4",
        "kept_policy", "load_kept", "load_kept 16", "load_kept 8", "load_kept 4", "load_kept 2", "load_kept 1",
        "load_resident", "load_resident 16", "load_resident 8", "load_resident 4",
        "max_f16x2", "min_f16x2", "max_bf16x2", "min_bf16x2",
        "cluster_arrive", "cluster_wait", "cluster_barrier",
        "store_to_block_float", "store_to_block_int", "store_to_block_double", "store_to_block_long long",
        "store_to_block_bool",
    }
)  # fmt: skip

# What a helper calls in turn.
_CALLS = {
    "round_f16": ("cvt_f16_f32", "cvt_f32_f16"),
    "round_bf16": ("cvt_bf16_f32", "cvt_f32_bf16"),
    "cvt_bf16_f64": ("cvt_bf16_f32",),
    "exp_approx": ("exp2_approx",),
    "sigmoid_f32": ("exp_approx",),
    "erf_f32": ("exp2_approx",),
    "cluster_wait": ("cluster_arrive",),
    "max_pair_f16": ("max_f16x2", "cvt_f32_f16", "maximum_f32"),
    "min_pair_f16": ("min_f16x2", "cvt_f32_f16", "minimum_f32"),
    "max_pair_bf16": ("max_bf16x2", "maximum_f32"),
    "min_pair_bf16": ("min_bf16x2", "minimum_f32"),
}
# And before sm_80, which rounds one value at a time.
_CALLS_BEFORE_SM_80 = {"cvt_f16x2_f32": ("cvt_f16_f32",), "cvt_bf16x2_f32": ("cvt_bf16_f32",)}


@dataclass(frozen=True)
class Pack:
    """`lanes` elements of `dtype` in 32-bit words, loaded and stored `bytes` at a time (4, 8 or 16)."""

    dtype: DType
    lanes: int
    bytes: int

    @property
    def name(self) -> str:
        """`bf16x8`; `bf16x8_by4` where alignment allows only narrower accesses than the usual."""
        size = self.lanes * self.dtype.itemsize
        return f"{self.dtype.name}x{self.lanes}" + ("" if self.bytes == min(16, size) else f"_by{self.bytes}")

    @property
    def words(self) -> int:
        """32-bit words of the pack."""
        return self.lanes * self.dtype.itemsize // 4

    @property
    def get(self) -> str:
        """The statement that reads element `i`."""
        shifted = {4: "", 2: "word[i / 2] >> i % 2 * 16", 1: "word[i / 4] >> i % 4 * 8"}.get(self.dtype.itemsize, "")
        return {
            "f16": f"return cvt_f32_f16({shifted} & 0xffff);",
            "bf16": "return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000 : word[i / 2] << 16);",
            "f32": "return __uint_as_float(word[i]);",
            "f64": "return __hiloint2double(word[2 * i + 1], word[2 * i]);",
            "i32": "return word[i];",
            "i64": "return (long long)word[2 * i + 1] << 32 | word[2 * i];",
            "i16": f"return (short)({shifted});",
            "i8": f"return (signed char)({shifted});",
            "u8": f"return {shifted} & 0xff;",
            "bool": f"return ({shifted} & 0xff) != 0;",
        }[self.dtype.name]

    @property
    def set(self) -> str:
        """The statement that writes word `i` from the elements `x`."""
        quarter = " | ".join(f"(x[4 * i + {k}] & 0xff) << {8 * k}" if k else "(x[4 * i] & 0xff)" for k in range(4))
        return {
            "f16": "p.word[i] = cvt_f16x2_f32(x[2 * i + 1], x[2 * i]);",
            "bf16": "p.word[i] = cvt_bf16x2_f32(x[2 * i + 1], x[2 * i]);",
            "f32": "p.word[i] = __float_as_uint(x[i]);",
            "f64": "p.word[i] = i % 2 ? __double2hiint(x[i / 2]) : __double2loint(x[i / 2]);",
            "i32": "p.word[i] = x[i];",
            "i64": "p.word[i] = i % 2 ? x[i / 2] >> 32 : x[i / 2];",
            "i16": "p.word[i] = (x[2 * i] & 0xffff) | x[2 * i + 1] << 16;",
            "i8": f"p.word[i] = {quarter};",
            "u8": f"p.word[i] = {quarter};",
            "bool": f"p.word[i] = {quarter};",
        }[self.dtype.name]

    def calls(self, reads: bool, writes: bool) -> tuple[str, ...]:
        """The primitives that the struct needs."""
        out = ("cvt_f32_f16",) if reads and self.dtype == F16 else ()
        return (*out, f"cvt_{self.dtype.name}x2_f32") if writes and self.dtype in (F16, BF16) else out


def prelude(used: set[str], packs: dict[Pack, tuple[bool, bool]], capability: int) -> tuple[str, str]:
    """(device primitives, portable helpers) for the helpers `used` and the packs, each with (is read, is written), with
    bodies for devices of compute capability `capability` and later."""
    sm_80 = capability >= 80
    calls = _CALLS if sm_80 else {**_CALLS, **_CALLS_BEFORE_SM_80}
    needed = set(used)
    for pack, (reads, writes) in packs.items():
        needed.update(pack.calls(reads, writes))
    pending = list(needed)
    while pending:
        for name in calls.get(pending.pop(), ()):
            if name not in needed:
                needed.add(name)
                pending.append(name)
    views = [
        {
            "name": p.name, "lanes": p.lanes, "dtype": p.dtype.name, "bytes": p.bytes, "words": p.words,
            "value": compute_type(p.dtype), "get_text": p.get, "set_text": p.set, "reads": reads, "writes": writes,
        }
        for p, (reads, writes) in sorted(packs.items(), key=lambda item: item[0].name)
    ]  # fmt: skip
    primitives = render("cuda/primitives.cu.j2", used=needed & PRIMITIVES, sm_80=sm_80)
    return primitives, render("cuda/helpers.cu.j2", used=needed, packs=views, sm_80=sm_80)
