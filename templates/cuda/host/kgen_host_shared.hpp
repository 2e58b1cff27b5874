// Shared memory: thread-local storage of the kernel's library. Part of the runtime; a kernel does not include it.
//
// A block's threads are fibres of one system thread, so thread-local is shared by them. The blocks of a cluster run on one system
// thread too, and each has a copy of its own: that of the block that runs lies where the kernel looks for it.
#pragma once

#include <link.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kgen_host_abi.hpp"

namespace kgen_host {

struct Range {
    char* start = nullptr;
    std::size_t bytes = 0;
};

// The calling thread's thread-local storage of the kernel's library. It holds the kernel's static shared memory and nothing else
// but the dynamic shared memory and the anchor.
inline Range thread_storage(void* anchor) {
    struct Search {
        char* anchor;
        Range found;
    } search{static_cast<char*>(anchor), {}};
    dl_iterate_phdr(
        [](dl_phdr_info* library, std::size_t, void* data) -> int {
            Search& search = *static_cast<Search*>(data);
            char* start = static_cast<char*>(library->dlpi_tls_data);
            if (start == nullptr || search.anchor < start) return 0;
            for (int i = 0; i < library->dlpi_phnum; ++i) {
                const auto& header = library->dlpi_phdr[i];
                if (header.p_type == PT_TLS && search.anchor < start + header.p_memsz) {
                    search.found = {start, header.p_memsz};
                    return 1;
                }
            }
            return 0;
        },
        &search);
    return search.found;
}

class SharedMemory {
public:
    SharedMemory(const Kernel& kernel, const Launch& launch) : poisoned_(launch.poison) {
        const Range all = thread_storage(kernel.shared_anchor());
        char* dynamic = static_cast<char*>(kernel.dynamic_shared());
        if (dynamic == nullptr || all.start == nullptr) {
            ranges_[0] = all;
        } else {
            ranges_[0] = {all.start, static_cast<std::size_t>(dynamic - all.start)};
            ranges_[1] = {dynamic, launch.shared_bytes};
            char* behind = dynamic + kDynamicSharedLimit;
            ranges_[2] = {behind, static_cast<std::size_t>(all.start + all.bytes - behind)};
        }
        std::size_t bytes = 0;
        for (const Range& range : ranges_) bytes += range.bytes;
        if (kernel.cluster > 1) copies_.assign(static_cast<std::size_t>(kernel.cluster), std::vector<char>(bytes));
    }

    // Before a block or a cluster starts, with its block 0.
    void start() {
        rank_ = 0;
        if (!poisoned_) return;
        for (const Range& range : ranges_) {
            if (range.bytes > 0) std::memset(range.start, 0xff, range.bytes);
        }
        for (std::vector<char>& copy : copies_) std::memset(copy.data(), 0xff, copy.size());
    }

    // Block `rank` of the cluster runs from now on.
    void switch_to(int rank) {
        if (rank == rank_) return;
        char* out = copies_[static_cast<std::size_t>(rank_)].data();
        const char* in = copies_[static_cast<std::size_t>(rank)].data();
        for (const Range& range : ranges_) {
            if (range.bytes == 0) continue;
            std::memcpy(out, range.start, range.bytes);
            std::memcpy(range.start, in, range.bytes);
            out += range.bytes;
            in += range.bytes;
        }
        rank_ = rank;
    }

    // What block `rank` of the cluster has at `place` of the block that runs; null where that is not in shared memory.
    char* of_block(void* place, std::size_t bytes, int rank) {
        char* own = static_cast<char*>(place);
        std::size_t before = 0;
        for (const Range& range : ranges_) {
            if (own >= range.start && own + bytes <= range.start + range.bytes) {
                return rank == rank_ ? own : copies_[static_cast<std::size_t>(rank)].data() + before + (own - range.start);
            }
            before += range.bytes;
        }
        return nullptr;
    }

private:
    Range ranges_[3];
    std::vector<std::vector<char>> copies_;  // by rank; that of the block that runs is stale
    int rank_ = 0;
    bool poisoned_;
};

}  // namespace kgen_host
