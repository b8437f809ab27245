// CUDA's execution model in host C++, as far as solvers/cuda uses it, for one block at a time.
//
// By default every CUDA thread is a fiber and a seeded random choice says which goes on at each switch:
// at barriers, warp exchanges and atomics. Turns taken in order would hide most of what schedules can do. A
// schedule that cannot go on, an exchange whose lanes differ, and one that is not over after so many
// switches are errors, never a hang.
//
// With CUDA_HOST_THREADS every CUDA thread is a thread, for ThreadSanitizer. What orders memory in CUDA
// orders it here and nothing else: barriers and fences do; warp exchanges and atomics do not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one block at a time
#define __launch_bounds__(...)

namespace cuda_host {

struct Index {
    unsigned x = 0;
};
constexpr int kLanes = 32;

// What all lanes of a warp bring to an exchange, as 64-bit words.
using Lanes = std::uint64_t[kLanes];

enum class Kind { sync, ballot, shuffle, reduce, match };

const Lanes& exchange(Kind kind, unsigned mask, std::uint64_t word);  // all lanes of the mask, or none
void block_barrier();
void at_atomic();  // a place where threads may take turns
void fence();
[[noreturn]] void fail(const std::string& what);

template <class T>
std::uint64_t to_word(T value) {
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
}
template <class T>
T from_word(std::uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

}  // namespace cuda_host

#ifdef CUDA_HOST_THREADS
extern thread_local cuda_host::Index threadIdx;
#else
extern cuda_host::Index threadIdx;
#endif
extern cuda_host::Index blockIdx, blockDim, gridDim;

using std::max;
using std::min;

inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __popc(unsigned word) { return __builtin_popcount(word); }

inline void __syncthreads() { cuda_host::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_host::exchange(cuda_host::Kind::sync, mask, 0); }
inline void __threadfence_block() { cuda_host::fence(); }

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
    const auto& words = cuda_host::exchange(cuda_host::Kind::ballot, mask, predicate);
    unsigned votes = 0;
    for (int lane = 0; lane < cuda_host::kLanes; ++lane)
        if (mask >> lane & 1 && words[lane]) votes |= 1u << lane;
    return votes;
}
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    const auto& words = cuda_host::exchange(cuda_host::Kind::shuffle, mask, cuda_host::to_word(value));
    if (!(mask >> (lane % cuda_host::kLanes) & 1)) cuda_host::fail("shuffle from a lane outside its mask");
    return cuda_host::from_word<T>(words[lane % cuda_host::kLanes]);
}

template <class Join>
unsigned reduce_sync(unsigned mask, unsigned value, Join&& join) {
    const auto& words = cuda_host::exchange(cuda_host::Kind::reduce, mask, value);
    bool first = true;
    unsigned all = 0;
    for (int lane = 0; lane < cuda_host::kLanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const auto word = static_cast<unsigned>(words[lane]);
        all = first ? word : join(all, word);
        first = false;
    }
    return all;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return reduce_sync(mask, value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return reduce_sync(mask, value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return reduce_sync(mask, value, [](unsigned a, unsigned b) { return a + b; });
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
    const auto word = cuda_host::to_word(value);
    const auto& words = cuda_host::exchange(cuda_host::Kind::match, mask, word);
    unsigned same = 0;
    for (int lane = 0; lane < cuda_host::kLanes; ++lane)
        if (mask >> lane & 1 && words[lane] == word) same |= 1u << lane;
    return same;
}

template <class T>
T atomicAdd(T* at, T value) {
    cuda_host::at_atomic();
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* at, T value) {
    cuda_host::at_atomic();
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicExch(T* at, T value) {
    cuda_host::at_atomic();
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
    cuda_host::at_atomic();
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T>
T atomicMax(T* at, T value) {
    cuda_host::at_atomic();
    T seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (seen < value &&
           !__atomic_compare_exchange_n(at, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}
