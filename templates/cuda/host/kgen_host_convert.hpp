// The primitives of the contract in kgen_host.hpp: conversions between the float formats, and exp2_approx.
#pragma once

#include "kgen_host_math.hpp"

namespace kgen_host {

// binary64 to binary32, rounded to odd: an inexact result has its last bit set. Rounding it once more, to a format with at
// least two bits fewer, gives what a single rounding from binary64 gives.
inline float round_to_odd(double x) {
    const float nearest = (float)x;
    if ((double)nearest == x || x != x) return nearest;
    unsigned bits = __float_as_uint(nearest);
    if (fabs((double)nearest) > fabs(x)) bits -= 1;  // towards zero; from infinity that is the largest finite number
    return __uint_as_float(bits | 1u);
}

}  // namespace kgen_host

inline float cvt_f32_f16(unsigned short bits) {
    const unsigned sign = (unsigned)(bits & 0x8000u) << 16;
    const unsigned exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0u) return __uint_as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float magnitude = (float)fraction * 0x1p-24f;  // zero or subnormal
    return __uint_as_float(sign | __float_as_uint(magnitude));
}

inline unsigned short cvt_f16_f32(float x) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const unsigned sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x47800000u) return (unsigned short)(sign | 0x7c00u);  // 65536 and above
    if (magnitude < 0x38800000u) {                                          // below 2**-14: the hardware adder rounds to 2**-24
        const float shifted = __uint_as_float(magnitude) + 0.5f;
        return (unsigned short)(sign | (__float_as_uint(shifted) - 0x3f000000u));
    }
    const unsigned rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return (unsigned short)(sign | ((rounded - 0x38000000u) >> 13));
}

inline unsigned short cvt_bf16_f32(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline unsigned short cvt_f16_f64(double x) { return cvt_f16_f32(kgen_host::round_to_odd(x)); }
inline unsigned short cvt_bf16_f64(double x) { return cvt_bf16_f32(kgen_host::round_to_odd(x)); }

inline unsigned cvt_f16x2_f32(float hi, float lo) { return ((unsigned)cvt_f16_f32(hi) << 16) | cvt_f16_f32(lo); }
inline unsigned cvt_bf16x2_f32(float hi, float lo) { return ((unsigned)cvt_bf16_f32(hi) << 16) | cvt_bf16_f32(lo); }

namespace kgen_host {
// Bits of two 16-bit floats, widened by `wide`: the greater one (the smaller one if `least`), NaN is 0x7fff.
template <class Wide>
inline unsigned pick(unsigned a, unsigned b, bool least, Wide wide) {
    const float x = wide((unsigned short)a), y = wide((unsigned short)b);
    if (x != x || y != y) return 0x7fffu;
    if (x == y) return ((a >> 15 & 1u) != 0) == least ? a : b;  // of two zeros -0 is the smaller one
    return (x < y) == least ? a : b;
}
inline float wide_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
template <class Wide>
inline unsigned pick_pair(unsigned a, unsigned b, bool least, Wide wide) {
    return pick(a >> 16, b >> 16, least, wide) << 16 | pick(a & 0xffffu, b & 0xffffu, least, wide);
}
}  // namespace kgen_host

inline unsigned max_f16x2(unsigned a, unsigned b) { return kgen_host::pick_pair(a, b, false, cvt_f32_f16); }
inline unsigned min_f16x2(unsigned a, unsigned b) { return kgen_host::pick_pair(a, b, true, cvt_f32_f16); }
inline unsigned max_bf16x2(unsigned a, unsigned b) { return kgen_host::pick_pair(a, b, false, kgen_host::wide_bf16); }
inline unsigned min_bf16x2(unsigned a, unsigned b) { return kgen_host::pick_pair(a, b, true, kgen_host::wide_bf16); }

inline void prefetch_l2(const void*) {}

inline unsigned long long kept_policy() { return 0; }

template <class T>
inline T load_kept(const T* from, unsigned long long) { return *from; }

template <class T>
inline T load_resident(const T* from, unsigned long long) { return *from; }

template <class T>
inline T load_staying(const T* from) { return *from; }

template <int BYTES, int WORDS>
inline void store_streaming(void* to, const unsigned (&word)[WORDS]) {
    for (int i = 0; i < WORDS; ++i) ((unsigned*)to)[i] = word[i];
}

inline float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}
