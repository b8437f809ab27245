// Independent problems over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace eplb {

// Calls work(i) for i in [0, count) on `threads` threads, in chunks; one thread starts none.
template <class Work>
void for_each_problem(std::int64_t count, int threads, Work&& work, std::int64_t chunk = 16) {
    const std::int64_t useful = std::min<std::int64_t>(threads, (count + chunk - 1) / chunk);
    if (useful <= 1) {
        for (std::int64_t i = 0; i < count; ++i) work(i);
        return;
    }
    std::atomic<std::int64_t> next{0};
    const auto run = [&] {
        for (std::int64_t begin; (begin = next.fetch_add(chunk)) < count;)
            for (std::int64_t i = begin; i < std::min(begin + chunk, count); ++i) work(i);
    };
    std::vector<std::thread> others;  // not std::jthread, which some standard libraries lack
    try {
        for (std::int64_t t = 1; t < useful; ++t) others.emplace_back(run);
    } catch (const std::system_error&) {
        // The system gives no more threads: those there are share the work.
    }
    run();
    for (std::thread& other : others) other.join();
}

}  // namespace eplb
