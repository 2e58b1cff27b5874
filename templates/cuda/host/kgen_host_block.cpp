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

Block::Block(const Kernel& kernel, const Launch& launch, void** arguments, StackPool& stacks, SharedMemory& shared)
    : kernel_(kernel), launch_(launch), arguments_(arguments), pool_(stacks), shared_(shared),
      of_block_(static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2])), block_warps_((of_block_ + 31) / 32) {
    const unsigned* extent = launch.block;
    members_.resize(static_cast<std::size_t>(kernel.cluster));
    threads_.resize(members_.size() * static_cast<std::size_t>(of_block_));
    warps_.resize(members_.size() * static_cast<std::size_t>(block_warps_));  // with clusters, blocks are of whole warps
    for (unsigned thread = 0; thread < static_cast<unsigned>(of_block_); ++thread) {
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
    kgen_host_context.block_idx = first_block_ = block_idx;
    kgen_host_context.block_dim = dim3(launch_.block[0], launch_.block[1], launch_.block[2]);
    kgen_host_context.grid_dim = dim3(launch_.grid[0], launch_.grid[1], launch_.grid[2]);
    random_ = Random(order_seed);
    free_stacks_ = stacks_;
    for (Thread& thread : threads_) thread.started = thread.arrived = false;
    std::fill(members_.begin(), members_.end(), Member{});
    ready_members_ = 0;
    for (std::size_t w = 0; w < warps_.size(); ++w) {
        const int lanes = of_block_ - static_cast<int>(w) % block_warps_ * 32;
        Warp& warp = warps_[w];
        warp.present = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1u;
        warp.ready = warp.exited = warp.waiting = warp.meeting = 0;
        ready(w, warp.present);
    }
    alive_ = static_cast<int>(threads_.size());
    cluster_arrived_ = 0;
    cluster_phase_ = 0;
    last_exited_ = -1;
    failed_ = false;
    current_ = 0;
    const int first = pick();
    current_block = this;
    make_current(first);
    start(first, take_stack());
    prepare_fibre(threads_[first].fibre, threads_[first].stack, fibre_main);
    running_ = true;
    switch_fibre(main_, threads_[first].fibre);
    running_ = false;
    current_block = nullptr;
    return !failed_;
}

void Block::make_current(int thread) {
    current_ = thread;
    kgen_host_context.thread_idx = thread_ids_[thread % of_block_];
    kgen_host_context.lane = thread % of_block_ & 31;
    if (members_.size() > 1) {
        shared_.switch_to(rank_of(thread));
        kgen_host_context.block_idx.x = first_block_.x + static_cast<unsigned>(rank_of(thread));
    }
}

void Block::start(int thread, Stack stack) {
    threads_[thread].started = true;
    threads_[thread].stack = stack;
    ++members_[static_cast<std::size_t>(rank_of(thread))].started;
}

void Block::ready(std::size_t warp, unsigned lanes) {
    warps_[warp].ready |= lanes;
    if (warps_[warp].ready == 0) return;
    const std::size_t rank = warp / static_cast<std::size_t>(block_warps_);
    members_[rank].ready_warps |= 1u << warp % static_cast<std::size_t>(block_warps_);
    ready_members_ |= 1u << rank;
}

void Block::not_ready(int thread) {
    Warp& warp = warps_[thread / 32];
    Member& member = members_[static_cast<std::size_t>(rank_of(thread))];
    warp.ready &= ~(1u << (thread & 31));
    if (warp.ready == 0) member.ready_warps &= ~(1u << thread / 32 % block_warps_);
    if (member.ready_warps == 0) ready_members_ &= ~(1u << rank_of(thread));
}

int Block::pick() {
    if (ready_members_ == 0) return -1;
    int w = current_ / 32, rank = rank_of(current_), lane;
    if (launch_.shuffled) {
        // A block of a cluster goes on for some time, so that it may get ahead of others by as much as barriers allow.
        if (members_[rank].ready_warps == 0 || (members_.size() > 1 && random_.below(256) == 0)) {
            rank = nth(ready_members_, random_.below(static_cast<unsigned>(__builtin_popcount(ready_members_))));
        }
        const unsigned warps = members_[rank].ready_warps;
        w = rank * block_warps_ + nth(warps, random_.below(static_cast<unsigned>(__builtin_popcount(warps))));
        lane = nth(warps_[w].ready, random_.below(static_cast<unsigned>(__builtin_popcount(warps_[w].ready))));
    } else {
        // The warp that runs goes on as long as it can, since its stacks are in the cache; then the next one above it. So
        // does the block of a cluster.
        if (warps_[w].ready == 0) {
            int before = w % block_warps_;
            if (members_[rank].ready_warps == 0) {
                const unsigned above = ready_members_ & ~((2u << rank) - 1u);
                rank = lowest(above ? above : ready_members_);
                before = block_warps_ - 1;
            }
            const unsigned warps = members_[rank].ready_warps;
            const unsigned above = warps & ~((2u << before) - 1u);
            w = rank * block_warps_ + lowest(above ? above : warps);
        }
        lane = lowest(warps_[w].ready);
    }
    not_ready(w * 32 + lane);
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
            block.start(next, block.threads_[left].stack);
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
        start(next, take_stack());
        prepare_fibre(thread.fibre, thread.stack, fibre_main);
    }
    switch_fibre(threads_[self].fibre, thread.fibre);
}

void Block::leave() {
    Warp& warp = warps_[current_ / 32];
    const unsigned bit = 1u << (current_ & 31);
    warp.exited |= bit;
    Member& member = own();
    --alive_;
    ++member.exited;
    last_exited_ = current_;
    if (member.arrived > 0) {
        fail(format("%s was reached by %d of %d threads, and %s left the kernel without it", barrier_names[member.kind],
                    member.arrived, of_block_, where(current_).c_str()),
             member.site);
    }
    if (members_.size() > 1) {
        // Who leaves counts as one who has come.
        Thread& thread = threads_[current_];
        if (thread.arrived && thread.arrived_phase == cluster_phase_) --cluster_arrived_;
        thread.arrived = false;
        meet_if_all();
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
    Member& member = own();
    threads_[current_].waits_at = site;
    if (member.arrived == 0) {
        member.kind = kind;
        member.site = site;
        member.value = kind == kSyncthreadsAnd;
        if (member.exited > 0) {
            fail(format("%s cannot be reached by all threads: %s has left the kernel", barrier_names[kind],
                        where(last_exited_).c_str()),
                 site);
        }
    } else if (kind != member.kind || site.line != member.site.line) {
        fail(format("%s waits at %s, but other threads of the block wait at %s (%s)", where(current_).c_str(),
                    barrier_names[kind], barrier_names[member.kind], member.site.text().c_str()),
             site);
    }
    const int holds = predicate != 0;
    if (kind == kSyncthreadsOr) member.value |= holds;
    if (kind == kSyncthreadsAnd) member.value &= holds;
    if (kind == kSyncthreadsCount) member.value += holds;
    if (++member.arrived < of_block_) {
        suspend();
    } else {
        member.arrived = 0;
        member.result = member.value;
        const auto first = static_cast<std::size_t>(rank_of(current_) * block_warps_);
        for (std::size_t w = first; w < first + static_cast<std::size_t>(block_warps_); ++w) ready(w, warps_[w].present);
        not_ready(current_);
    }
    // The next barrier completes only when every thread has come to it, thus after all have read this.
    return member.result;
}

void Block::cluster_arrive(Site site) {
    Thread& thread = threads_[current_];
    thread.waits_at = site;
    if (members_.size() == 1) fail("the kernel has no cluster, and comes to the barrier of one", site);
    if (thread.arrived) fail("it comes to the barrier of the cluster again, and has not waited for the others yet", site);
    thread.arrived = true;
    thread.arrived_phase = cluster_phase_;
    ++cluster_arrived_;
    meet_if_all();
}

void Block::cluster_wait(Site site) {
    Thread& thread = threads_[current_];
    thread.waits_at = site;
    if (!thread.arrived) fail("it waits at the barrier of the cluster and has not arrived there", site);
    thread.arrived = false;
    if (thread.arrived_phase != cluster_phase_) return;
    warps_[current_ / 32].meeting |= 1u << (current_ & 31);
    suspend();
}

void Block::meet_if_all() {
    if (cluster_arrived_ == 0 || cluster_arrived_ < alive_) return;
    cluster_arrived_ = 0;
    ++cluster_phase_;
    for (std::size_t w = 0; w < warps_.size(); ++w) {
        ready(w, warps_[w].meeting);
        warps_[w].meeting = 0;
    }
}

void Block::store_to_block(void* place, int rank, const void* value, std::size_t bytes, Site site) {
    const int count = static_cast<int>(members_.size());
    if (rank < 0 || rank >= count) fail(format("a store to block %d of a cluster of %d", rank, count), site);
    const Member& target = members_[static_cast<std::size_t>(rank)];
    if (target.started == 0) {
        fail(format("a store to block %d of the cluster, which may not have started", rank), site);
    }
    if (target.exited == of_block_) fail(format("a store to block %d of the cluster, which has ended", rank), site);
    char* there = shared_.of_block(place, bytes, rank);
    if (there == nullptr) fail("a store to another block of the cluster, at an address that is not in shared memory", site);
    std::memcpy(there, value, bytes);
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
    ready(static_cast<std::size_t>(current_ / 32), mask & ~(1u << last));
}

std::string Block::where(int thread) const {
    const uint3 id = thread_ids_[static_cast<std::size_t>(thread % of_block_)];
    const std::string own = format("thread (%u,%u,%u)", id.x, id.y, id.z);
    return rank_of(thread) == rank_of(current_) ? own : own + format(" of block %d of the cluster", rank_of(thread));
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
    for (const Member& member : members_) {
        if (member.arrived == 0) continue;
        message += format(" %d of %d threads wait at %s (%s);", member.arrived, of_block_, barrier_names[member.kind],
                          member.site.text().c_str());
    }
    if (cluster_arrived_ > 0) {
        message += format(" %d of %zu threads have come to the barrier of the cluster;", cluster_arrived_, threads_.size());
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
void kgen_host_cluster_arrive(const char* file, int line) { kgen_host::current_block->cluster_arrive({file, line}); }
void kgen_host_cluster_wait(const char* file, int line) { kgen_host::current_block->cluster_wait({file, line}); }
void kgen_host_store_to_block(void* place, int rank, const void* value, unsigned long bytes, const char* file, int line) {
    kgen_host::current_block->store_to_block(place, rank, value, bytes, {file, line});
}
unsigned kgen_host_active_mask() { return kgen_host::current_block->active_mask(); }
void kgen_host_fail(const char* message, const char* file, int line) {
    kgen_host::current_block->fail(message, {file, line});
}

}  // extern "C"
