// What a compiled kernel and the runtime (kgen_host_runtime.cpp) share. Both are compiled against this one file.
#pragma once

#include "kgen_host_language.hpp"

namespace kgen_host {

// Where the running fibre stands. The runtime writes it at every switch; one per system thread.
struct Context {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    int lane;  // of the thread in its warp: 0..31
};

// What the lanes of a mask do together. The order is known to `collective_names` in the runtime.
enum Collective : int { kSyncwarp, kShuffle, kShuffleXor, kShuffleUp, kShuffleDown, kBallot, kAny, kAll };

// What the threads of a block do together. The order is known to `barrier_names` in the runtime.
enum Barrier : int { kSyncthreads, kSyncthreadsOr, kSyncthreadsAnd, kSyncthreadsCount };

// Type of a kernel parameter: 'p' pointer, 'i' signed and 'u' unsigned integer, 'b' bool, 'f' floating point, 's' structure.
struct Parameter {
    int kind;
    unsigned size;  // bytes
};

// What a compiled kernel exports, under the name kgen_host_kernel.
struct Kernel {
    const char* name;
    void (*invoke)(void** arguments);       // one thread: calls the kernel with *arguments[i] as its i-th argument
    void* (*shared_anchor)();               // any address in the calling thread's copy of the static shared memory
    void* (*dynamic_shared)();              // the calling thread's dynamic shared memory; null if the kernel has none
    int cluster;                            // blocks of a cluster; 1 if the kernel has none
    int parameter_count;
    const Parameter* parameters;
};

struct Launch {
    unsigned grid[3], block[3];
    unsigned shared_bytes;       // dynamic shared memory
    int workers;                 // system threads that run blocks
    int shuffled;                // 1: `order_seed` orders blocks and threads; 0: ascending
    int poison;                  // 1: shared memory starts as 0xff bytes; 0: whatever was there
    unsigned long long order_seed;
};

constexpr unsigned kDynamicSharedLimit = 232448;  // bytes: 227 KiB, the most a block may ask for on sm_90

}  // namespace kgen_host

extern "C" {
// `__thread` and initial-exec: reading threadIdx is one load, with no call to find the variable.
extern __thread kgen_host::Context kgen_host_context __attribute__((tls_model("initial-exec")));

int kgen_host_barrier(int barrier, int predicate, const char* file, int line);
unsigned long long kgen_host_collective(int collective, unsigned mask, unsigned long long value, int source_lane,
                                        const char* file, int line);
unsigned kgen_host_active_mask();
void kgen_host_cluster_arrive(const char* file, int line);
void kgen_host_cluster_wait(const char* file, int line);
void kgen_host_store_to_block(void* place, int rank, const void* value, unsigned long bytes, const char* file, int line);
[[noreturn]] void kgen_host_fail(const char* message, const char* file, int line);

int kgen_host_launch(const kgen_host::Kernel* kernel, const kgen_host::Launch* launch, void** arguments, char* error,
                     unsigned long error_size);
}
