// Qualifiers, vector types and bit-level intrinsics of CUDA C++.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// One object for each block: the threads of a block are fibres of one system thread, and `thread_local` in a function is static.
#define __shared__ thread_local

using size_t = decltype(sizeof(0));

// ---- vector types: layout and alignment as on the device -------------------------------------------------------------

#define KGEN_HOST_VECTOR2(name, T, align)                                          \
    struct alignas(align) name { T x, y; };                                        \
    inline name make_##name(T x, T y) { return name{x, y}; }
#define KGEN_HOST_VECTOR3(name, T)                                                 \
    struct name { T x, y, z; };                                                    \
    inline name make_##name(T x, T y, T z) { return name{x, y, z}; }
#define KGEN_HOST_VECTOR4(name, T, align)                                          \
    struct alignas(align) name { T x, y, z, w; };                                  \
    inline name make_##name(T x, T y, T z, T w) { return name{x, y, z, w}; }

KGEN_HOST_VECTOR2(char2, signed char, 2)
KGEN_HOST_VECTOR4(char4, signed char, 4)
KGEN_HOST_VECTOR2(uchar2, unsigned char, 2)
KGEN_HOST_VECTOR4(uchar4, unsigned char, 4)
KGEN_HOST_VECTOR2(short2, short, 4)
KGEN_HOST_VECTOR4(short4, short, 8)
KGEN_HOST_VECTOR2(ushort2, unsigned short, 4)
KGEN_HOST_VECTOR4(ushort4, unsigned short, 8)
KGEN_HOST_VECTOR2(int2, int, 8)
KGEN_HOST_VECTOR3(int3, int)
KGEN_HOST_VECTOR4(int4, int, 16)
KGEN_HOST_VECTOR2(uint2, unsigned, 8)
KGEN_HOST_VECTOR3(uint3, unsigned)
KGEN_HOST_VECTOR4(uint4, unsigned, 16)
KGEN_HOST_VECTOR2(longlong2, long long, 16)
KGEN_HOST_VECTOR4(longlong4, long long, 16)
KGEN_HOST_VECTOR2(ulonglong2, unsigned long long, 16)
KGEN_HOST_VECTOR4(ulonglong4, unsigned long long, 16)
KGEN_HOST_VECTOR2(float2, float, 8)
KGEN_HOST_VECTOR3(float3, float)
KGEN_HOST_VECTOR4(float4, float, 16)
KGEN_HOST_VECTOR2(double2, double, 16)
KGEN_HOST_VECTOR4(double4, double, 16)

#undef KGEN_HOST_VECTOR2
#undef KGEN_HOST_VECTOR3
#undef KGEN_HOST_VECTOR4

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- bit casts and bit counts ----------------------------------------------------------------------------------------

namespace kgen_host {
template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace kgen_host

inline unsigned __float_as_uint(float x) { return kgen_host::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return kgen_host::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return kgen_host::bit_cast<float>(x); }
inline float __int_as_float(int x) { return kgen_host::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return kgen_host::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return kgen_host::bit_cast<double>(x); }
inline double __hiloint2double(int hi, int lo) {
    return __longlong_as_double((long long)(((unsigned long long)(unsigned)hi << 32) | (unsigned)lo));
}
// The low word of hi:lo, shifted right.
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (shift & 31));
}
inline int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return (int)__double_as_longlong(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = ((unsigned long long)b << 32) | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= (unsigned)((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
    }
    return result;
}
