// Fibres: stacks and the switch between them. Part of the runtime; a kernel does not include it.
//
// A switch saves what the C calling convention says a call keeps, and nothing else: about ten instructions. Other machines, and
// builds with KGEN_HOST_UCONTEXT, use ucontext, which also makes a system call to save the signal mask.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#if !defined(KGEN_HOST_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define KGEN_HOST_UCONTEXT
#endif
#ifdef KGEN_HOST_UCONTEXT
#include <ucontext.h>
#endif

namespace kgen_host {

// ---- stacks ------------------------------------------------------------------------------------------------------------

constexpr std::size_t kStackBytes = 128 * 1024;  // address space; memory is taken a page at a time as a fibre touches it

struct Stack {
    char* low = nullptr;   // first usable byte; the guard page is below it
    char* high = nullptr;  // where the first frame goes, 16-byte aligned
};

// Stacks that no block uses now. They are never unmapped: the next launch takes them again.
class StackPool {
public:
    Stack take() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty()) map_slab();
        const Stack stack = free_.back();
        free_.pop_back();
        return stack;
    }
    void give_back(const std::vector<Stack>& stacks) {
        std::lock_guard<std::mutex> lock(mutex_);
        free_.insert(free_.end(), stacks.begin(), stacks.end());
    }
    std::mutex& mutex() { return mutex_; }

private:
    void map_slab() {
        constexpr int count = 64;
        const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t stride = page + (kStackBytes + page - 1) / page * page;
        void* slab = mmap(nullptr, stride * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) throw std::bad_alloc();
        for (int i = 0; i < count; ++i) {
            char* base = static_cast<char*>(slab) + stride * static_cast<std::size_t>(i);
            mprotect(base, page, PROT_NONE);
            // Tops that were equal modulo 4 KiB would share a few lines of the first-level cache, so they are spread over it.
            const std::size_t colour = static_cast<std::size_t>(i) * 320 % 4096 / 64 * 64;
            free_.push_back({base + page, base + stride - colour});
        }
    }

    std::mutex mutex_;
    std::vector<Stack> free_;
};

// ---- switching -----------------------------------------------------------------------------------------------------------

#ifdef KGEN_HOST_UCONTEXT

struct Fibre {
    ucontext_t context;
};
inline void prepare_fibre(Fibre& fibre, Stack stack, void (*entry)()) {
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = stack.low;
    fibre.context.uc_stack.ss_size = static_cast<std::size_t>(stack.high - stack.low);
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, entry, 0);
}
inline void switch_fibre(Fibre& from, Fibre& to) { swapcontext(&from.context, &to.context); }

#else

struct Fibre {
    void* stack_pointer = nullptr;
};
extern "C" void kgen_host_switch(void** save_stack_pointer, void* stack_pointer);

#if defined(__x86_64__)
inline void prepare_fibre(Fibre& fibre, Stack stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack.high);
    *--top = nullptr;                           // the return address of `entry`, which never returns
    *--top = reinterpret_cast<void*>(entry);    // where the switch jumps to, with the stack as after a call
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fibre.stack_pointer = top;
}
#elif defined(__aarch64__)
inline void prepare_fibre(Fibre& fibre, Stack stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack.high) - 20;
    for (int i = 0; i < 20; ++i) top[i] = nullptr;
    top[11] = reinterpret_cast<void*>(entry);  // x30
    fibre.stack_pointer = top;
}
#endif
inline void switch_fibre(Fibre& from, Fibre& to) { kgen_host_switch(&from.stack_pointer, to.stack_pointer); }

#endif

}  // namespace kgen_host
