// Float and double functions, intrinsics with a rounding mode, min/max/abs, and conversions of CUDA C++.
//
// Functions are the C library's, which round better than the device's; the `__name` variants that are approximate on the device
// (__expf, __fdividef, ...) are the accurate functions here. Subnormal numbers are kept.
#pragma once

#include "kgen_host_language.hpp"

// A function of the C library for both widths, with the overload on float that C++ has.
#define KGEN_HOST_FUNCTION1(name)                                                  \
    extern "C" double name(double) noexcept;                                       \
    extern "C" float name##f(float) noexcept;                                      \
    inline float name(float x) { return name##f(x); }
#define KGEN_HOST_FUNCTION2(name)                                                  \
    extern "C" double name(double, double) noexcept;                               \
    extern "C" float name##f(float, float) noexcept;                               \
    inline float name(float x, float y) { return name##f(x, y); }

KGEN_HOST_FUNCTION1(sqrt)
KGEN_HOST_FUNCTION1(cbrt)
KGEN_HOST_FUNCTION1(exp)
KGEN_HOST_FUNCTION1(exp2)
KGEN_HOST_FUNCTION1(exp10)
KGEN_HOST_FUNCTION1(expm1)
KGEN_HOST_FUNCTION1(log)
KGEN_HOST_FUNCTION1(log2)
KGEN_HOST_FUNCTION1(log10)
KGEN_HOST_FUNCTION1(log1p)
KGEN_HOST_FUNCTION1(sin)
KGEN_HOST_FUNCTION1(cos)
KGEN_HOST_FUNCTION1(tan)
KGEN_HOST_FUNCTION1(asin)
KGEN_HOST_FUNCTION1(acos)
KGEN_HOST_FUNCTION1(atan)
KGEN_HOST_FUNCTION1(sinh)
KGEN_HOST_FUNCTION1(cosh)
KGEN_HOST_FUNCTION1(tanh)
KGEN_HOST_FUNCTION1(asinh)
KGEN_HOST_FUNCTION1(acosh)
KGEN_HOST_FUNCTION1(atanh)
KGEN_HOST_FUNCTION1(erf)
KGEN_HOST_FUNCTION1(erfc)
KGEN_HOST_FUNCTION1(lgamma)
KGEN_HOST_FUNCTION1(tgamma)
KGEN_HOST_FUNCTION1(fabs)
KGEN_HOST_FUNCTION1(floor)
KGEN_HOST_FUNCTION1(ceil)
KGEN_HOST_FUNCTION1(trunc)
KGEN_HOST_FUNCTION1(round)
KGEN_HOST_FUNCTION1(rint)
KGEN_HOST_FUNCTION1(nearbyint)
KGEN_HOST_FUNCTION2(pow)
KGEN_HOST_FUNCTION2(fmod)
KGEN_HOST_FUNCTION2(remainder)
KGEN_HOST_FUNCTION2(fmin)
KGEN_HOST_FUNCTION2(fmax)
KGEN_HOST_FUNCTION2(fdim)
KGEN_HOST_FUNCTION2(copysign)
KGEN_HOST_FUNCTION2(atan2)
KGEN_HOST_FUNCTION2(hypot)
#undef KGEN_HOST_FUNCTION1
#undef KGEN_HOST_FUNCTION2

extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;

inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float rsqrt(float x) { return rsqrtf(x); }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }
inline int __isnanf(float x) { return __builtin_isnan(x); }
inline int __isinff(float x) { return __builtin_isinf(x); }
inline int __finitef(float x) { return __builtin_isfinite(x); }
inline int __isnan(double x) { return __builtin_isnan(x); }
inline int __isinf(double x) { return __builtin_isinf(x); }

// ---- intrinsics with a rounding mode; the compiler flags forbid contraction, so `*` and `+` are already these ------------

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// ---- intrinsics that are approximate on the device -----------------------------------------------------------------------

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// ---- min, max, abs: the overloads that CUDA C++ has; on floats the operand that is not NaN wins ----------------------------

#define KGEN_HOST_MIN_MAX(T, A, B)                                                 \
    inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }                   \
    inline T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }
#define KGEN_HOST_MIN_MAX_SIGNED(S, U)                                             \
    KGEN_HOST_MIN_MAX(S, S, S)                                                     \
    KGEN_HOST_MIN_MAX(U, U, U)                                                     \
    KGEN_HOST_MIN_MAX(U, S, U)                                                     \
    KGEN_HOST_MIN_MAX(U, U, S)
KGEN_HOST_MIN_MAX_SIGNED(int, unsigned)
KGEN_HOST_MIN_MAX_SIGNED(long, unsigned long)
KGEN_HOST_MIN_MAX_SIGNED(long long, unsigned long long)
#undef KGEN_HOST_MIN_MAX_SIGNED
#undef KGEN_HOST_MIN_MAX

inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin((double)a, b); }
inline double min(double a, float b) { return fmin(a, (double)b); }
inline double max(float a, double b) { return fmax((double)a, b); }
inline double max(double a, float b) { return fmax(a, (double)b); }

extern "C" int abs(int) noexcept;
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
extern "C" long long llabs(long long) noexcept;

// ---- conversions: out of range saturates and NaN is 0 in 32 bits and the least number in 64, as the device's cvt does ------

namespace kgen_host {
// `low` and `high` are the range of T in binary64; `high` is the first number above it.
template <class T>
inline T saturate(double x, double low, double high, T least, T most, T nan) {
    return x != x ? nan : x < low ? least : x >= high ? most : (T)x;
}
inline int to_int(double x) { return saturate<int>(x, -0x1p31, 0x1p31, -0x7fffffff - 1, 0x7fffffff, 0); }
inline unsigned to_uint(double x) { return saturate<unsigned>(x, 0.0, 0x1p32, 0u, 0xffffffffu, 0u); }
inline long long to_ll(double x) {
    return saturate<long long>(x, -0x1p63, 0x1p63, -0x7fffffffffffffffLL - 1, 0x7fffffffffffffffLL, -0x7fffffffffffffffLL - 1);
}
inline unsigned long long to_ull(double x) {
    return saturate<unsigned long long>(x, 0.0, 0x1p64, 0ull, ~0ull, 0x8000000000000000ull);
}
}  // namespace kgen_host

#define KGEN_HOST_TO_INTEGER(from, T)                                                                                     \
    inline int __##from##2int_rz(T x) { return kgen_host::to_int(trunc((double)x)); }                                     \
    inline int __##from##2int_rn(T x) { return kgen_host::to_int(rint((double)x)); }                                      \
    inline int __##from##2int_rd(T x) { return kgen_host::to_int(floor((double)x)); }                                     \
    inline int __##from##2int_ru(T x) { return kgen_host::to_int(ceil((double)x)); }                                      \
    inline unsigned __##from##2uint_rz(T x) { return kgen_host::to_uint(trunc((double)x)); }                              \
    inline unsigned __##from##2uint_rn(T x) { return kgen_host::to_uint(rint((double)x)); }                               \
    inline long long __##from##2ll_rz(T x) { return kgen_host::to_ll(trunc((double)x)); }                                 \
    inline long long __##from##2ll_rn(T x) { return kgen_host::to_ll(rint((double)x)); }                                  \
    inline long long __##from##2ll_rd(T x) { return kgen_host::to_ll(floor((double)x)); }                                 \
    inline unsigned long long __##from##2ull_rz(T x) { return kgen_host::to_ull(trunc((double)x)); }
KGEN_HOST_TO_INTEGER(float, float)
KGEN_HOST_TO_INTEGER(double, double)
#undef KGEN_HOST_TO_INTEGER

inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline double __int2double_rn(int x) { return (double)x; }
inline double __uint2double_rn(unsigned x) { return (double)x; }
inline double __ll2double_rn(long long x) { return (double)x; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }

extern "C" int printf(const char*, ...);
