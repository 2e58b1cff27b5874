// A block: its threads as fibres, who of them may run, and what they wait for. Part of the runtime; a kernel does not include it.
// The blocks of a cluster run together: their threads and warps are numbered one block after the other.
//
// A fibre runs until it waits at a barrier or a collective, or leaves the kernel; then the next one that may run is switched to
// directly. The one that completes a barrier or a collective goes on at once. When nobody may run and somebody waits, the kernel
// is in error, and the message says who waits where: a divergent barrier is a sentence, not a hang.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kgen_host_abi.hpp"
#include "kgen_host_fibre.hpp"
#include "kgen_host_shared.hpp"

namespace kgen_host {

constexpr const char* collective_names[] = {"__syncwarp",     "__shfl_sync",   "__shfl_xor_sync", "__shfl_up_sync",
                                            "__shfl_down_sync", "__ballot_sync", "__any_sync",      "__all_sync"};
constexpr const char* barrier_names[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count"};

// xorshift64*: small, and the same on every machine.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) {
        if (state_ == 0) state_ = 1;
        for (int i = 0; i < 4; ++i) below(2);
    }
    unsigned below(unsigned limit) {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        const std::uint64_t upper = (state_ * 0x2545f4914f6cdd1dull) >> 32;
        return static_cast<unsigned>(upper * limit >> 32);
    }

private:
    std::uint64_t state_;
};

struct Site {
    const char* file = nullptr;
    int line = 0;
    std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

struct Thread {
    Fibre fibre;
    Stack stack;
    bool started = false;
    bool arrived = false;        // at the cluster's barrier, for which it has not waited yet
    unsigned arrived_phase = 0;  // how often the cluster had met before
    Site waits_at;  // of the barrier or collective it last came to
};

struct Warp {
    unsigned present = 0;  // lanes that the block has
    unsigned ready = 0;    // lanes that may run
    unsigned exited = 0;   // lanes that left the kernel
    unsigned waiting = 0;  // lanes at a collective that is not complete
    unsigned meeting = 0;  // lanes that wait for the cluster
    Collective collective[32];
    unsigned mask[32];
    int source[32];
    unsigned long long value[32];   // what a lane brings
    unsigned long long result[32];  // what it takes away
};

// One block of a cluster, or the only one.
struct Member {
    unsigned ready_warps = 0;
    int started = 0, exited = 0;  // threads
    int arrived = 0;              // threads at the barrier of the block
    int value = 0, result = 0;
    Barrier kind = kSyncthreads;
    Site site;
};

class Block {
public:
    Block(const Kernel& kernel, const Launch& launch, void** arguments, StackPool& stacks, SharedMemory& shared);
    ~Block();
    Block(const Block&) = delete;

    // Runs one block, or a cluster whose first block it is, to its end; false if it failed, and then error() says why.
    bool run(uint3 block_idx, std::uint64_t order_seed);
    const std::string& error() const { return error_; }

    // Called from the running fibre.
    int barrier(Barrier kind, int predicate, Site site);
    unsigned long long collective(Collective kind, unsigned mask, unsigned long long value, int source, Site site);
    void cluster_arrive(Site site);
    void cluster_wait(Site site);
    void store_to_block(void* place, int rank, const void* value, std::size_t bytes, Site site);
    unsigned active_mask() const { return warps_[current_ / 32].present & ~warps_[current_ / 32].exited; }
    [[noreturn]] void fail(const std::string& message, Site site);
    bool running() const { return running_; }
    const Stack& current_stack() const { return threads_[current_].stack; }

private:
    static void fibre_main();
    int pick();               // the thread to run next, or -1; it is no longer ready
    void start(int thread, Stack stack);
    void ready(std::size_t warp, unsigned lanes);
    void not_ready(int thread);
    void meet_if_all();       // all threads have come to the barrier of the cluster: they may go on
    int rank_of(int thread) const { return thread / of_block_; }
    Member& own() { return members_[static_cast<std::size_t>(rank_of(current_))]; }
    void make_current(int thread);
    void suspend();           // runs others until the current thread is ready again
    void leave();             // the current thread has left the kernel
    void complete(Warp& warp, unsigned mask, int lane);
    [[noreturn]] void fail_nobody_ready();
    [[noreturn]] void stop();  // back to run(); every fibre is abandoned
    std::string where(int thread) const;
    Stack take_stack();

    const Kernel& kernel_;
    const Launch& launch_;
    void** arguments_;
    StackPool& pool_;
    SharedMemory& shared_;
    const int of_block_;     // threads of a block
    const int block_warps_;  // its warps
    std::vector<Thread> threads_;
    std::vector<uint3> thread_ids_;
    std::vector<Warp> warps_;
    std::vector<Member> members_;
    std::vector<Stack> stacks_, free_stacks_;  // all that this block took from the pool, and those not in use
    Fibre main_;
    Random random_{0};
    uint3 first_block_{};
    unsigned ready_members_ = 0;
    int current_ = 0, alive_ = 0;
    int cluster_arrived_ = 0;     // threads at the barrier of the cluster
    unsigned cluster_phase_ = 0;  // how often it was complete
    int last_exited_ = -1;
    bool running_ = false, failed_ = false;
    std::string error_;
};

extern thread_local Block* current_block;

}  // namespace kgen_host
