"""Which identifiers may a kernel's names not take in CUDA C?

Keywords of C++17, what NVRTC declares without an include and generated code might meet, and the names that
`templates/cuda` defines.
"""

from __future__ import annotations

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
concept const const_cast consteval constexpr constinit continue co_await co_return co_yield decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq restrict typeof
"""

_TYPES = """
size_t ptrdiff_t nullptr_t wint_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uint ushort ulong
uchar char1 char2 char3 char4 uchar1 uchar2 uchar3 uchar4 short1 short2 short3 short4 ushort1 ushort2 ushort3 ushort4
int1 int2 int3 int4 uint1 uint2 uint3 uint4 long1 long2 long3 long4 ulong1 ulong2 ulong3 ulong4 longlong1 longlong2
longlong3 longlong4 ulonglong1 ulonglong2 ulonglong3 ulonglong4 float1 float2 float3 float4 double1 double2 double3
double4 dim3 half half2 std cuda cooperative_groups cudaStream_t cudaError_t cudaEvent_t clock_t va_list wmma nvcuda
f32 f64 f16 bf16
"""

_OBJECTS = """
threadIdx blockIdx blockDim gridDim warpSize main assert printf malloc free memcpy memset memmove memcmp alloca
clock clock64 NULL INFINITY NAN true false INT_MAX INT_MIN
THREADS ROWS CLUSTER ROW_THREADS
"""

_MATH = """
abs labs llabs min max umin umax llmin llmax ullmin ullmax fabs fmin fmax fmod remainder remquo fma fdim hypot rhypot
norm3d norm4d rnorm3d rnorm4d norm rnorm sqrt rsqrt cbrt rcbrt sin cos tan sinpi cospi sincos sincospi asin acos atan
atan2 sinh cosh tanh asinh acosh atanh exp exp2 exp10 expm1 log log2 log10 log1p logb ilogb pow powi erf erfc erfinv
erfcinv erfcx normcdf normcdfinv lgamma tgamma j0 j1 jn y0 y1 yn cyl_bessel_i0 cyl_bessel_i1 ceil floor trunc round
rint nearbyint lround llround lrint llrint frexp ldexp scalbn scalbln modf nextafter nan copysign isnan isinf isfinite
isnormal signbit fdivide saturate div ldiv lldiv isgreater isless isunordered fpclassify
"""

_HELPERS = """
cvt_f32_f16 cvt_f16_f32 cvt_bf16_f32 cvt_f16_f64 cvt_bf16_f64 cvt_f16x2_f32 cvt_bf16x2_f32 exp2_approx cvt_f32_bf16
prefetch_l2 kept_policy load_kept load_resident load_staying load_shifted store_streaming stay_packed exp_approx
sigmoid erf_f32 maximum minimum sign floor_div floor_mod round_f16 round_bf16 argmax_take argmin_take
max_f16x2 min_f16x2 max_bf16x2 min_bf16x2 max_pair_f16 min_pair_f16 max_pair_bf16 min_pair_bf16
max_of_pair_f16 min_of_pair_f16 max_of_pair_bf16 min_of_pair_bf16
store_to_block cluster_arrive cluster_wait cluster_barrier kgen_host kgen_host_context kgen_host_kernel kgen_host_anchor
"""

_FLOAT_SUFFIXED = tuple(f"{name}f" for name in _MATH.split()) + tuple(f"{name}l" for name in _MATH.split())
# Packs: bf16x8, f32x4_by8, ...
_PACKS = tuple(
    f"{dtype}x{lanes}{by}"
    for dtype in ("f16", "bf16", "f32", "f64", "i8", "u8", "i16", "i32", "i64", "bool")
    for lanes in (1, 2, 4, 8, 16, 32)
    for by in ("", "_by4", "_by8", "_by16")
)
_ATOMICS = tuple(f"atomic{op}" for op in ["Add", "Sub", "Exch", "Min", "Max", "Inc", "Dec", "CAS", "And", "Or", "Xor"])

RESERVED: frozenset[str] = frozenset(
    (*_KEYWORDS.split(), *_TYPES.split(), *_OBJECTS.split(), *_MATH.split(), *_HELPERS.split())
).union(_FLOAT_SUFFIXED, _PACKS, _ATOMICS)
