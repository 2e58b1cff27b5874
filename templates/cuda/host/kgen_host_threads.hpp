// Co-operation of threads: barriers, shuffles, votes, atomics, fences and the loads with a cache hint.
//
// Each barrier and collective passes its own source position (the default arguments), so that an error can name it; a #line
// in the kernel's text makes that a position in the program which the kernel was generated from.
#pragma once

#include "kgen_host_abi.hpp"

#define threadIdx kgen_host_context.thread_idx
#define blockIdx kgen_host_context.block_idx
#define blockDim kgen_host_context.block_dim
#define gridDim kgen_host_context.grid_dim
constexpr int warpSize = 32;

#define KGEN_HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- barriers of a block ---------------------------------------------------------------------------------------------

inline void __syncthreads(KGEN_HOST_SITE) { kgen_host_barrier(kgen_host::kSyncthreads, 0, file, line); }
inline int __syncthreads_or(int predicate, KGEN_HOST_SITE) {
    return kgen_host_barrier(kgen_host::kSyncthreadsOr, predicate, file, line);
}
inline int __syncthreads_and(int predicate, KGEN_HOST_SITE) {
    return kgen_host_barrier(kgen_host::kSyncthreadsAnd, predicate, file, line);
}
inline int __syncthreads_count(int predicate, KGEN_HOST_SITE) {
    return kgen_host_barrier(kgen_host::kSyncthreadsCount, predicate, file, line);
}

// ---- clusters of blocks: kgen's primitives, see kgen_host.hpp -----------------------------------------------------------

inline void cluster_arrive(KGEN_HOST_SITE) { kgen_host_cluster_arrive(file, line); }
inline void cluster_wait(KGEN_HOST_SITE) { kgen_host_cluster_wait(file, line); }
inline void cluster_barrier(KGEN_HOST_SITE) {
    kgen_host_cluster_arrive(file, line);
    kgen_host_cluster_wait(file, line);
}
template <class T>
inline void store_to_block(T* place, int rank, T x, KGEN_HOST_SITE) {
    kgen_host_store_to_block(place, rank, &x, sizeof x, file, line);
}

// ---- votes of a warp -------------------------------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = 0xffffffffu, KGEN_HOST_SITE) {
    kgen_host_collective(kgen_host::kSyncwarp, mask, 0, kgen_host_context.lane, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, KGEN_HOST_SITE) {
    return (unsigned)kgen_host_collective(kgen_host::kBallot, mask, predicate != 0, kgen_host_context.lane, file, line);
}
inline int __any_sync(unsigned mask, int predicate, KGEN_HOST_SITE) {
    return (int)kgen_host_collective(kgen_host::kAny, mask, predicate != 0, kgen_host_context.lane, file, line);
}
inline int __all_sync(unsigned mask, int predicate, KGEN_HOST_SITE) {
    return (int)kgen_host_collective(kgen_host::kAll, mask, predicate != 0, kgen_host_context.lane, file, line);
}
// Lanes that have not left the kernel. On the device it is the lanes that happen to run together, a subset of these.
inline unsigned __activemask() { return kgen_host_active_mask(); }

// ---- shuffles: a lane's source by the rules of PTX shfl.sync ------------------------------------------------------------

namespace kgen_host {

inline int shuffle_width(int width, const char* file, int line) {
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        kgen_host_fail("the width of a shuffle is not a power of two from 1 to 32", file, line);
    }
    return width;
}
inline int shuffle_source(int source, int width) {
    const int lane = kgen_host_context.lane;
    return (lane & -width) | (source & (width - 1));
}
inline int shuffle_xor_source(int lane_mask, int width) {  // a segment above the own one is out of reach, one below is not
    const int lane = kgen_host_context.lane, source = (lane ^ lane_mask) & 31;
    return source <= (lane | (width - 1)) ? source : lane;
}
inline int shuffle_up_source(unsigned delta, int width) {
    const int lane = kgen_host_context.lane, in_segment = lane & (width - 1);
    return delta <= (unsigned)in_segment ? lane - (int)delta : lane;
}
inline int shuffle_down_source(unsigned delta, int width) {
    const int lane = kgen_host_context.lane, room = (width - 1) - (lane & (width - 1));
    return delta <= (unsigned)room ? lane + (int)delta : lane;
}

template <class T>
inline T exchange(Collective collective, unsigned mask, T value, int source, const char* file, int line) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = kgen_host_collective(collective, mask, bits, source, file, line);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace kgen_host

#define KGEN_HOST_SHUFFLES(T)                                                                                             \
    inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, KGEN_HOST_SITE) {                            \
        source = kgen_host::shuffle_source(source, kgen_host::shuffle_width(width, file, line));                          \
        return kgen_host::exchange(kgen_host::kShuffle, mask, value, source, file, line);                                 \
    }                                                                                                                     \
    inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, KGEN_HOST_SITE) {                     \
        const int source = kgen_host::shuffle_xor_source(lane_mask, kgen_host::shuffle_width(width, file, line));         \
        return kgen_host::exchange(kgen_host::kShuffleXor, mask, value, source, file, line);                              \
    }                                                                                                                     \
    inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, KGEN_HOST_SITE) {                     \
        const int source = kgen_host::shuffle_up_source(delta, kgen_host::shuffle_width(width, file, line));              \
        return kgen_host::exchange(kgen_host::kShuffleUp, mask, value, source, file, line);                               \
    }                                                                                                                     \
    inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, KGEN_HOST_SITE) {                   \
        const int source = kgen_host::shuffle_down_source(delta, kgen_host::shuffle_width(width, file, line));            \
        return kgen_host::exchange(kgen_host::kShuffleDown, mask, value, source, file, line);                             \
    }
KGEN_HOST_SHUFFLES(int)
KGEN_HOST_SHUFFLES(unsigned)
KGEN_HOST_SHUFFLES(long)
KGEN_HOST_SHUFFLES(unsigned long)
KGEN_HOST_SHUFFLES(long long)
KGEN_HOST_SHUFFLES(unsigned long long)
KGEN_HOST_SHUFFLES(float)
KGEN_HOST_SHUFFLES(double)
#undef KGEN_HOST_SHUFFLES

// ---- traps -----------------------------------------------------------------------------------------------------------

[[noreturn]] inline void __trap(KGEN_HOST_SITE) { kgen_host_fail("__trap() was called", file, line); }
#define assert(condition) ((condition) ? (void)0 : kgen_host_fail("assert(" #condition ") failed", __FILE__, __LINE__))

// ---- atomics and fences: blocks run on several system threads, so these are the real thing ------------------------------

namespace kgen_host {
template <class T, class Bits, class Update>
inline T atomic_update(T* address, Update update) {
    Bits expected = __atomic_load_n((Bits*)address, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n((Bits*)address, &expected, bit_cast<Bits>(update(bit_cast<T>(expected))), false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return bit_cast<T>(expected);
}
}  // namespace kgen_host

#define KGEN_HOST_ATOMICS(T)                                                                                              \
    inline T atomicAdd(T* address, T value) { return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST); }              \
    inline T atomicSub(T* address, T value) { return __atomic_fetch_sub(address, value, __ATOMIC_SEQ_CST); }              \
    inline T atomicAnd(T* address, T value) { return __atomic_fetch_and(address, value, __ATOMIC_SEQ_CST); }              \
    inline T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST); }                \
    inline T atomicXor(T* address, T value) { return __atomic_fetch_xor(address, value, __ATOMIC_SEQ_CST); }              \
    inline T atomicExch(T* address, T value) { return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST); }            \
    inline T atomicMax(T* address, T value) {                                                                             \
        return kgen_host::atomic_update<T, T>(address, [=](T old) { return old < value ? value : old; });                 \
    }                                                                                                                     \
    inline T atomicMin(T* address, T value) {                                                                             \
        return kgen_host::atomic_update<T, T>(address, [=](T old) { return value < old ? value : old; });                 \
    }                                                                                                                     \
    inline T atomicCAS(T* address, T compare, T value) {                                                                  \
        __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
        return compare;                                                                                                   \
    }
KGEN_HOST_ATOMICS(int)
KGEN_HOST_ATOMICS(unsigned)
KGEN_HOST_ATOMICS(long long)
KGEN_HOST_ATOMICS(unsigned long long)
#undef KGEN_HOST_ATOMICS

inline float atomicAdd(float* address, float value) {
    return kgen_host::atomic_update<float, unsigned>(address, [=](float old) { return old + value; });
}
inline double atomicAdd(double* address, double value) {
    return kgen_host::atomic_update<double, unsigned long long>(address, [=](double old) { return old + value; });
}
inline float atomicExch(float* address, float value) {
    return kgen_host::atomic_update<float, unsigned>(address, [=](float) { return value; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return kgen_host::atomic_update<unsigned, unsigned>(address, [=](unsigned old) { return old >= limit ? 0u : old + 1u; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
    return kgen_host::atomic_update<unsigned, unsigned>(
        address, [=](unsigned old) { return old == 0u || old > limit ? limit : old - 1u; });
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- loads and stores with a cache hint --------------------------------------------------------------------------------

namespace kgen_host {
// A misaligned access is reported where the caller is, not in this header.
template <class T>
inline T* aligned(T* address, const char* file, int line) {
    if ((size_t)address % alignof(T) != 0) kgen_host_fail("misaligned address in a cached load or store", file, line);
    return address;
}
}  // namespace kgen_host

#define KGEN_HOST_LOAD(name)                                                                                              \
    template <class T> inline T name(const T* address, KGEN_HOST_SITE) { return *kgen_host::aligned(address, file, line); }
#define KGEN_HOST_STORE(name)                                                                                             \
    template <class T> inline void name(T* address, T value, KGEN_HOST_SITE) {                                            \
        *kgen_host::aligned(address, file, line) = value;                                                                 \
    }
KGEN_HOST_LOAD(__ldg)
KGEN_HOST_LOAD(__ldca)
KGEN_HOST_LOAD(__ldcg)
KGEN_HOST_LOAD(__ldcs)
KGEN_HOST_LOAD(__ldlu)
KGEN_HOST_LOAD(__ldcv)
KGEN_HOST_STORE(__stwb)
KGEN_HOST_STORE(__stcg)
KGEN_HOST_STORE(__stcs)
KGEN_HOST_STORE(__stwt)
#undef KGEN_HOST_LOAD
#undef KGEN_HOST_STORE
