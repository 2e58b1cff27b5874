// The scheduler of a block's threads. See kgen_host_block.hpp.
#include "kgen_host_block.hpp"

__thread kgen_host::Context kgen_host_context __attribute__((tls_model("initial-exec"))) = {};

namespace kgen_host {

thread_local Block* current_block = nullptr;

static std::string format(const char* pattern, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, pattern);
    std::vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

static int lowest(unsigned bits) { return __builtin_ctz(bits); }

static int nth(unsigned bits, unsigned n) {
    for (; n > 0; --n) bits &= bits - 1;
    return lowest(bits);
}

Block::Block(const Kernel& kernel, const Launch& launch, void** arguments, StackPool& stacks)
    : kernel_(kernel), launch_(launch), arguments_(arguments), pool_(stacks) {
    const unsigned* extent = launch.block;
    const unsigned count = extent[0] * extent[1] * extent[2];
    threads_.resize(count);
    warps_.resize((count + 31) / 32);
    for (unsigned thread = 0; thread < count; ++thread) {
        thread_ids_.push_back({thread % extent[0], thread / extent[0] % extent[1], thread / (extent[0] * extent[1])});
    }
}

Block::~Block() { pool_.give_back(stacks_); }

Stack Block::take_stack() {
    if (free_stacks_.empty()) {
        stacks_.push_back(pool_.take());
        free_stacks_.push_back(stacks_.back());
    }
    const Stack stack = free_stacks_.back();
    free_stacks_.pop_back();
    return stack;
}

bool Block::run(uint3 block_idx, std::uint64_t order_seed) {
    kgen_host_context.block_idx = block_idx;
    kgen_host_context.block_dim = dim3(launch_.block[0], launch_.block[1], launch_.block[2]);
    kgen_host_context.grid_dim = dim3(launch_.grid[0], launch_.grid[1], launch_.grid[2]);
    random_ = Random(order_seed);
    free_stacks_ = stacks_;
    const int count = static_cast<int>(threads_.size());
    for (Thread& thread : threads_) thread.started = false;
    ready_warps_ = 0;
    for (std::size_t w = 0; w < warps_.size(); ++w) {
        const int lanes = count - static_cast<int>(w) * 32;
        Warp& warp = warps_[w];
        warp.present = warp.ready = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1u;
        warp.exited = warp.waiting = 0;
        ready_warps_ |= 1u << w;
    }
    alive_ = count;
    arrived_ = exited_ = 0;
    last_exited_ = -1;
    failed_ = false;
    current_ = 0;
    const int first = pick();
    current_block = this;
    make_current(first);
    threads_[first].started = true;
    threads_[first].stack = take_stack();
    prepare_fibre(threads_[first].fibre, threads_[first].stack, fibre_main);
    running_ = true;
    switch_fibre(main_, threads_[first].fibre);
    running_ = false;
    current_block = nullptr;
    return !failed_;
}

void Block::make_current(int thread) {
    current_ = thread;
    kgen_host_context.thread_idx = thread_ids_[thread];
    kgen_host_context.lane = thread & 31;
}

int Block::pick() {
    if (ready_warps_ == 0) return -1;
    int w = current_ / 32, lane;
    if (launch_.shuffled) {
        w = nth(ready_warps_, random_.below(static_cast<unsigned>(__builtin_popcount(ready_warps_))));
        lane = nth(warps_[w].ready, random_.below(static_cast<unsigned>(__builtin_popcount(warps_[w].ready))));
    } else {
        // The warp that runs goes on as long as it can, since its stacks are in the cache; then the next one above it.
        if (warps_[w].ready == 0) {
            const unsigned above = ready_warps_ & ~((2u << w) - 1u);
            w = lowest(above ? above : ready_warps_);
        }
        lane = lowest(warps_[w].ready);
    }
    warps_[w].ready &= ~(1u << lane);
    if (warps_[w].ready == 0) ready_warps_ &= ~(1u << w);
    return w * 32 + lane;
}

void Block::fibre_main() {
    Block& block = *current_block;
    for (;;) {
        block.kernel_.invoke(block.arguments_);
        block.leave();
        const int next = block.pick();
        if (next < 0) {
            if (block.alive_ > 0) block.fail_nobody_ready();
            block.stop();
        }
        const int left = block.current_;
        block.make_current(next);
        Thread& thread = block.threads_[next];
        if (!thread.started) {  // it starts on this stack: a kernel without barriers never switches
            thread.started = true;
            thread.stack = block.threads_[left].stack;
            continue;
        }
        block.free_stacks_.push_back(block.threads_[left].stack);
        switch_fibre(block.threads_[left].fibre, thread.fibre);
    }
}

void Block::suspend() {
    const int self = current_;
    const int next = pick();
    if (next < 0) fail_nobody_ready();
    make_current(next);
    Thread& thread = threads_[next];
    if (!thread.started) {
        thread.started = true;
        thread.stack = take_stack();
        prepare_fibre(thread.fibre, thread.stack, fibre_main);
    }
    switch_fibre(threads_[self].fibre, thread.fibre);
}

void Block::leave() {
    Warp& warp = warps_[current_ / 32];
    const unsigned bit = 1u << (current_ & 31);
    warp.exited |= bit;
    --alive_;
    ++exited_;
    last_exited_ = current_;
    if (arrived_ > 0) {
        fail(format("%s was reached by %d of %zu threads, and %s left the kernel without it", barrier_names[barrier_kind_],
                    arrived_, threads_.size(), where(current_).c_str()),
             barrier_site_);
    }
    for (unsigned lanes = warp.waiting; lanes != 0; lanes &= lanes - 1) {
        const int lane = lowest(lanes);
        if (warp.mask[lane] & bit) {
            const int thread = (current_ & ~31) + lane;
            fail(format("the mask 0x%08x of %s names lane %d, and %s left the kernel without it", warp.mask[lane],
                        collective_names[warp.collective[lane]], current_ & 31, where(current_).c_str()),
                 threads_[thread].waits_at);
        }
    }
}

int Block::barrier(Barrier kind, int predicate, Site site) {
    threads_[current_].waits_at = site;
    if (arrived_ == 0) {
        barrier_kind_ = kind;
        barrier_site_ = site;
        barrier_value_ = kind == kSyncthreadsAnd;
        if (exited_ > 0) {
            fail(format("%s cannot be reached by all threads: %s has left the kernel", barrier_names[kind],
                        where(last_exited_).c_str()),
                 site);
        }
    } else if (kind != barrier_kind_ || site.line != barrier_site_.line) {
        fail(format("%s waits at %s, but other threads of the block wait at %s (%s)", where(current_).c_str(),
                    barrier_names[kind], barrier_names[barrier_kind_], barrier_site_.text().c_str()),
             site);
    }
    const int holds = predicate != 0;
    if (kind == kSyncthreadsOr) barrier_value_ |= holds;
    if (kind == kSyncthreadsAnd) barrier_value_ &= holds;
    if (kind == kSyncthreadsCount) barrier_value_ += holds;
    if (++arrived_ < static_cast<int>(threads_.size())) {
        suspend();
    } else {
        arrived_ = 0;
        barrier_result_ = barrier_value_;
        for (std::size_t w = 0; w < warps_.size(); ++w) {
            warps_[w].ready = warps_[w].present;
            ready_warps_ |= 1u << w;
        }
        Warp& own = warps_[current_ / 32];
        own.ready &= ~(1u << (current_ & 31));
        if (own.ready == 0) ready_warps_ &= ~(1u << (current_ / 32));
    }
    // The next barrier completes only when every thread has come to it, thus after all have read this.
    return barrier_result_;
}

unsigned long long Block::collective(Collective kind, unsigned mask, unsigned long long value, int source, Site site) {
    Warp& warp = warps_[current_ / 32];
    const int lane = current_ & 31;
    threads_[current_].waits_at = site;
    if (!((mask >> lane) & 1u)) {
        fail(format("the mask 0x%08x of %s does not name the calling lane %d", mask, collective_names[kind], lane), site);
    }
    if (mask & warp.exited) {
        const int gone = lowest(mask & warp.exited);
        fail(format("the mask 0x%08x of %s names lane %d, and %s has left the kernel", mask, collective_names[kind], gone,
                    where((current_ & ~31) + gone).c_str()),
             site);
    }
    mask &= warp.present;  // the last warp of a block may have fewer than 32 lanes, and no others can come
    warp.collective[lane] = kind;
    warp.mask[lane] = mask;
    warp.value[lane] = value;
    warp.source[lane] = source;
    warp.waiting |= 1u << lane;
    if ((mask & ~warp.waiting) == 0) {
        complete(warp, mask, lane);
    } else {
        suspend();
    }
    return warp.result[lane];
}

void Block::complete(Warp& warp, unsigned mask, int last) {
    const Collective kind = warp.collective[last];
    const int first_thread = current_ & ~31;
    unsigned ballot = 0;
    for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) {
        const int lane = lowest(lanes);
        if (warp.collective[lane] != kind || warp.mask[lane] != mask) {
            fail(format("%s calls %s with mask 0x%08x, but %s of the same warp waits at %s with mask 0x%08x (%s)",
                        where(current_).c_str(), collective_names[kind], mask, where(first_thread + lane).c_str(),
                        collective_names[warp.collective[lane]], warp.mask[lane],
                        threads_[first_thread + lane].waits_at.text().c_str()),
                 threads_[current_].waits_at);
        }
        if (warp.value[lane] & 1u) ballot |= 1u << lane;
    }
    switch (kind) {
        case kSyncwarp:
            break;
        case kBallot:
        case kAny:
        case kAll: {
            const unsigned vote = kind == kBallot ? ballot : kind == kAny ? ballot != 0 : ballot == mask;
            for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) warp.result[lowest(lanes)] = vote;
            break;
        }
        default:
            for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) {
                const int lane = lowest(lanes), source = warp.source[lane];
                if (!((mask >> source) & 1u)) {
                    fail(format("%s reads lane %d in %s, which is not one of the lanes 0x%08x that take part",
                                where(first_thread + lane).c_str(), source, collective_names[kind], mask),
                         threads_[first_thread + lane].waits_at);
                }
                warp.result[lane] = warp.value[source];
            }
    }
    warp.waiting &= ~mask;
    warp.ready |= mask & ~(1u << last);
    if (warp.ready != 0) ready_warps_ |= 1u << (current_ / 32);
}

std::string Block::where(int thread) const {
    const uint3 id = thread_ids_[static_cast<std::size_t>(thread)];
    return format("thread (%u,%u,%u)", id.x, id.y, id.z);
}

void Block::fail(const std::string& message, Site site) {
    const uint3 block = kgen_host_context.block_idx;
    error_ = format("kernel '%s', block (%u,%u,%u), %s", kernel_.name, block.x, block.y, block.z, where(current_).c_str());
    if (site.file != nullptr) error_ += ", at " + site.text();
    error_ += ": " + message;
    failed_ = true;
    stop();
}

void Block::fail_nobody_ready() {
    std::string message = "no thread can go on:";
    Site site = threads_[current_].waits_at;
    if (arrived_ > 0) {
        message += format(" %d of %zu threads wait at %s (%s);", arrived_, threads_.size(), barrier_names[barrier_kind_],
                          barrier_site_.text().c_str());
    }
    int listed = 0;
    for (std::size_t w = 0; w < warps_.size() && listed < 4; ++w) {
        for (unsigned lanes = warps_[w].waiting; lanes != 0 && listed < 4; lanes &= lanes - 1, ++listed) {
            const int lane = lowest(lanes), thread = static_cast<int>(w) * 32 + lane;
            message += format(" %s waits at %s (%s) for the lanes 0x%08x;", where(thread).c_str(),
                              collective_names[warps_[w].collective[lane]], threads_[thread].waits_at.text().c_str(),
                              warps_[w].mask[lane] & ~warps_[w].waiting);
        }
    }
    message.back() = '.';
    fail(message, site);
}

void Block::stop() {
    Fibre abandoned;
    switch_fibre(abandoned, main_);
    __builtin_unreachable();
}

}  // namespace kgen_host

extern "C" {

int kgen_host_barrier(int barrier, int predicate, const char* file, int line) {
    return kgen_host::current_block->barrier(static_cast<kgen_host::Barrier>(barrier), predicate, {file, line});
}
unsigned long long kgen_host_collective(int collective, unsigned mask, unsigned long long value, int source_lane,
                                        const char* file, int line) {
    return kgen_host::current_block->collective(static_cast<kgen_host::Collective>(collective), mask, value, source_lane,
                                                {file, line});
}
unsigned kgen_host_active_mask() { return kgen_host::current_block->active_mask(); }
void kgen_host_fail(const char* message, const char* file, int line) {
    kgen_host::current_block->fail(message, {file, line});
}

}  // extern "C"
