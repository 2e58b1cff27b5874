// A launch: blocks over system threads, shared memory filled with 0xff bytes, and faults turned into errors.
#include <signal.h>

#include <atomic>
#include <system_error>
#include <thread>

#include "kgen_host_block.hpp"

namespace kgen_host {
namespace {

StackPool& stack_pool() {
    static StackPool* pool = new StackPool;  // never destroyed: a launch may run while the process ends
    return *pool;
}

// ---- faults --------------------------------------------------------------------------------------------------------------

constexpr int fault_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous_actions[4];
std::mutex fault_mutex;
int fault_users = 0;

void on_fault(int signal, siginfo_t* info, void*) {
    Block* block = current_block;
    if (block == nullptr || !block->running()) {  // not a kernel's: whoever handled it before does so again
        for (int i = 0; i < 4; ++i) {
            if (fault_signals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
        }
        return;
    }
    // The fibre is abandoned, so it does not matter that this handler never returns.
    const char* address = static_cast<char*>(info->si_addr);
    const char* low = block->current_stack().low;
    char text[128];
    if (signal == SIGFPE) {
        block->fail("integer division by zero or overflow", {});
    } else if (signal == SIGILL) {
        block->fail("illegal instruction", {});
    } else if (address < low && address >= low - 65536) {
        block->fail("the thread's local variables and calls need more than its stack of " +
                        std::to_string(kStackBytes / 1024) + " KiB",
                    {});
    }
    std::snprintf(text, sizeof text, "illegal memory access at address %p", static_cast<const void*>(address));
    block->fail(text, {});
}

// While one exists, faults of kernels are caught in every thread of the process.
class FaultHandlers {
public:
    FaultHandlers() {
        std::lock_guard<std::mutex> lock(fault_mutex);
        if (fault_users++ > 0) return;
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 4; ++i) sigaction(fault_signals[i], &action, &previous_actions[i]);
    }
    ~FaultHandlers() {
        std::lock_guard<std::mutex> lock(fault_mutex);
        if (--fault_users > 0) return;
        for (int i = 0; i < 4; ++i) sigaction(fault_signals[i], &previous_actions[i], nullptr);
    }
};

// A stack for the handler, since a fault may be that a stack is full.
class SignalStack {
public:
    SignalStack() : memory_(64 * 1024) {
        stack_t stack = {};
        stack.ss_sp = memory_.data();
        stack.ss_size = memory_.size();
        sigaltstack(&stack, &previous_);
    }
    ~SignalStack() { sigaltstack(&previous_, nullptr); }

private:
    std::vector<char> memory_;
    stack_t previous_;
};

// ---- blocks over threads -------------------------------------------------------------------------------------------------

class Grid {
public:
    Grid(const Kernel& kernel, const Launch& launch, void** arguments)
        : kernel_(kernel), launch_(launch), arguments_(arguments),
          across_(launch.grid[0] / static_cast<unsigned>(kernel.cluster)),
          blocks_(std::uint64_t{across_} * launch.grid[1] * launch.grid[2]) {
        // In shuffled order the i-th block (or cluster of blocks) to run is (a * i + b) mod blocks, with `a` prime to the number of blocks.
        if (!launch.shuffled) return;
        Random random(launch.order_seed);
        const auto limit = static_cast<unsigned>(blocks_ < 0xffffffffu ? blocks_ : 0xffffffffu);
        shift_ = random.below(limit);
        do factor_ = 1 + random.below(limit);
        while (common_divisor(factor_, blocks_) != 1);
    }

    void work() {
        SignalStack signal_stack;
        SharedMemory shared(kernel_, launch_);
        Block block(kernel_, launch_, arguments_, stack_pool(), shared);
        for (;;) {
            const std::uint64_t turn = next_.fetch_add(1);
            if (turn >= blocks_ || turn > failed_turn_.load()) return;
            const std::uint64_t index = (static_cast<unsigned __int128>(factor_) * turn + shift_) % blocks_;
            const auto x = static_cast<unsigned>(index % across_) * static_cast<unsigned>(kernel_.cluster);
            const auto y = static_cast<unsigned>(index / across_ % launch_.grid[1]);
            const auto z = static_cast<unsigned>(index / across_ / launch_.grid[1]);
            shared.start();
            if (!block.run({x, y, z}, launch_.order_seed * 0x100000001b3ull + index)) report(turn, block.error());
        }
    }

    std::uint64_t blocks() const { return blocks_; }  // those of a cluster count as one
    const std::string& error() const { return error_; }
    void report(std::uint64_t turn, const std::string& error) {
        // Turns are taken in order, so every one before a failed turn is run too: the error of the first is kept, always the same.
        std::lock_guard<std::mutex> lock(error_mutex_);
        if (!error_.empty() && turn >= failed_turn_.load()) return;
        failed_turn_.store(turn);
        error_ = error;
    }

private:
    static std::uint64_t common_divisor(std::uint64_t a, std::uint64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

    const Kernel& kernel_;
    const Launch& launch_;
    void** arguments_;
    const unsigned across_;  // blocks, or clusters, along x
    const std::uint64_t blocks_;
    std::uint64_t factor_ = 1, shift_ = 0;
    std::atomic<std::uint64_t> next_{0}, failed_turn_{~std::uint64_t{0}};
    std::mutex error_mutex_;
    std::string error_;
};

}  // namespace
}  // namespace kgen_host

// Runs the grid and returns 0, or 1 with a sentence in `error`. Any number of threads may launch at once.
int kgen_host_launch(const kgen_host::Kernel* kernel, const kgen_host::Launch* launch, void** arguments, char* error,
                     unsigned long error_size) {
    using namespace kgen_host;
    Grid grid(*kernel, *launch, arguments);
    try {
        FaultHandlers handlers;
        // A system thread takes some 30 microseconds to start; a grid of few threads is run by the caller alone.
        constexpr std::uint64_t threads_per_worker = 4096;
        const std::uint64_t of_block = std::uint64_t{launch->block[0]} * launch->block[1] * launch->block[2] *
                                       static_cast<unsigned>(kernel->cluster);
        // Each stack is two mappings, of which a process may have some 65 thousand.
        constexpr std::uint64_t most_stacks = 24576;
        const std::uint64_t useful = std::min(
            {grid.blocks(), grid.blocks() * of_block / threads_per_worker, std::max<std::uint64_t>(1, most_stacks / of_block)});
        std::vector<std::thread> workers;
        try {
            for (std::uint64_t i = 1; i < useful && i < static_cast<std::uint64_t>(launch->workers); ++i) {
                workers.emplace_back([&grid] { grid.work(); });
            }
        } catch (const std::system_error&) {
            // No more threads to be had: those that run, and this one, do the work.
        }
        grid.work();
        for (std::thread& worker : workers) worker.join();
    } catch (const std::bad_alloc&) {
        grid.report(0, std::string("kernel '") + kernel->name + "': not enough memory for the stacks of its threads");
    }
    if (grid.error().empty()) return 0;
    std::snprintf(error, error_size, "%s", grid.error().c_str());
    return 1;
}

// ---- checks that the compiler puts into a kernel (-fsanitize=alignment,bounds,...); the layouts are those of libubsan --------

namespace {
struct SanitizerSite {
    const char* file;
    std::uint32_t line, column;
};
struct SanitizerType {
    std::uint16_t kind, info;
    char name[1];
};
struct TypeMismatch {
    SanitizerSite site;
    const SanitizerType* type;
    unsigned char log2_alignment, access;
};
struct OutOfBounds {
    SanitizerSite site;
    const SanitizerType *array, *index;
};
struct Overflow {
    SanitizerSite site;
    const SanitizerType* type;
};
void fail(const std::string& message, const SanitizerSite& site) {
    kgen_host::current_block->fail(message, {site.file, static_cast<int>(site.line)});
}
}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1(TypeMismatch* check, std::uintptr_t address) {
    char text[160];
    std::snprintf(text, sizeof text, "misaligned address 0x%zx for type %s, which needs a multiple of %d bytes",
                  static_cast<std::size_t>(address), check->type->name, 1 << check->log2_alignment);
    fail(text, check->site);
}
void __ubsan_handle_out_of_bounds(OutOfBounds* check, std::uintptr_t index) {
    fail("index " + std::to_string(static_cast<long long>(index)) + " is outside an array of type " + check->array->name,
         check->site);
}
void __ubsan_handle_divrem_overflow(Overflow* check, std::uintptr_t, std::uintptr_t) {
    fail("integer division by zero or overflow", check->site);
}

}  // extern "C"
