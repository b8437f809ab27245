// CUDA threads as threads under ThreadSanitizer; included once.
//
// Waiting is done where the sanitizer does not look, so that it orders nothing; barriers and fences tell it
// what they order. Exchanges are of whole warps.
#pragma once

#include <sched.h>

#include <thread>

#include "cuda_host.hpp"

extern "C" void __tsan_acquire(void* at);
extern "C" void __tsan_release(void* at);

thread_local cuda_host::Index threadIdx;
cuda_host::Index blockIdx, blockDim, gridDim;

namespace cuda_host {

#define UNSEEN __attribute__((no_sanitize("thread"), noinline))

constexpr std::uint64_t kMostYields = 5'000'000;
constexpr unsigned kMostWarps = 32;

struct Meeting {
    unsigned arrived = 0, round = 0;
    char order;  // what the sanitizer knows it by
};

UNSEEN inline void meet(Meeting& at, unsigned size) {
    const unsigned round = __atomic_load_n(&at.round, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&at.arrived, 1, __ATOMIC_SEQ_CST) == size) {
        __atomic_store_n(&at.arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&at.round, round + 1, __ATOMIC_SEQ_CST);
        return;
    }
    for (std::uint64_t yields = 0; __atomic_load_n(&at.round, __ATOMIC_SEQ_CST) == round; ++yields) {
        if (yields == kMostYields) fail("deadlock: a thread waits for others that never come");
        sched_yield();
    }
}

// Two sets of words, so that the fastest lane's next exchange leaves alone what the slowest still reads.
struct Warp {
    Meeting meeting;
    Lanes words[2];
};
inline Warp warps[kMostWarps];
inline Meeting whole_block;
inline char fences;
inline thread_local unsigned exchanges;
inline thread_local Lanes taken;

UNSEEN inline void bring(Warp& warp, std::uint64_t word) {
    warp.words[exchanges % 2][threadIdx.x % kLanes] = word;
}
UNSEEN inline void take(Warp& warp) {
    for (int lane = 0; lane < kLanes; ++lane) taken[lane] = warp.words[exchanges % 2][lane];
}

const Lanes& exchange(Kind kind, unsigned mask, std::uint64_t word) {
    if (mask != 0xffffffffu) fail("a mask of some lanes, which threads do not do");
    Warp& warp = warps[threadIdx.x / kLanes];
    bring(warp, word);
    if (kind == Kind::sync) __tsan_release(&warp.meeting.order);
    meet(warp.meeting, kLanes);
    if (kind == Kind::sync) __tsan_acquire(&warp.meeting.order);
    take(warp);
    ++exchanges;
    return taken;
}

void block_barrier() {
    __tsan_release(&whole_block.order);
    meet(whole_block, blockDim.x);
    __tsan_acquire(&whole_block.order);
}

void at_atomic() { sched_yield(); }
void fence() {
    __tsan_acquire(&fences);
    __tsan_release(&fences);
}
void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::_Exit(3);
}

inline void begin_launch() {}
inline void run_block(unsigned threads, std::uint64_t, std::uint64_t, const std::function<void()>& kernel) {
    std::vector<std::thread> all;
    for (unsigned t = 0; t < threads; ++t)
        all.emplace_back([t, &kernel] {
            threadIdx.x = t, exchanges = 0;
            kernel();
        });
    for (std::thread& thread : all) thread.join();
}

}  // namespace cuda_host
