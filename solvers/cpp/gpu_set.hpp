// A set of GPUs as a bit mask of W words.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace eplb {

// Words of the sets for so many GPUs: 1, 2, 4, 8 or 16, the widths that solvers are compiled for.
constexpr int set_words(int gpus) { return static_cast<int>(std::bit_ceil((gpus + 63u) / 64u)); }

template <int W>
struct GpuSet {
    std::array<std::uint64_t, W> words{};

    static constexpr int capacity = 64 * W;

    static GpuSet read(const std::uint64_t* from) {
        GpuSet set;
        std::copy_n(from, W, set.words.begin());
        return set;
    }

    void insert(int gpu) { words[gpu >> 6] |= std::uint64_t{1} << (gpu & 63); }
    void insert_if(int gpu, bool member) { words[gpu >> 6] |= static_cast<std::uint64_t>(member) << (gpu & 63); }
    void erase(int gpu) { words[gpu >> 6] &= ~(std::uint64_t{1} << (gpu & 63)); }
    bool contains(int gpu) const { return words[gpu >> 6] >> (gpu & 63) & 1; }
    bool empty() const {
        std::uint64_t any = 0;
        for (const std::uint64_t w : words) any |= w;
        return any == 0;
    }
    // The lowest member; the set must not be empty.
    int lowest() const {
        int w = 0;
        while (words[w] == 0) ++w;
        return 64 * w + std::countr_zero(words[w]);
    }
    template <class Visit>
    void each(Visit&& visit) const {
        for (int w = 0; w < W; ++w)
            for (std::uint64_t rest = words[w]; rest != 0; rest &= rest - 1)
                visit(64 * w + std::countr_zero(rest));
    }
    void unite_if(const GpuSet& o, bool condition) {
        const std::uint64_t mask = -static_cast<std::uint64_t>(condition);
        for (int w = 0; w < W; ++w) words[w] |= o.words[w] & mask;
    }
    GpuSet& operator|=(const GpuSet& o) {
        for (int w = 0; w < W; ++w) words[w] |= o.words[w];
        return *this;
    }
    friend GpuSet operator|(GpuSet a, const GpuSet& b) { return a |= b; }
    friend GpuSet operator&(GpuSet a, const GpuSet& b) {
        for (int w = 0; w < W; ++w) a.words[w] &= b.words[w];
        return a;
    }
    friend GpuSet operator-(GpuSet a, const GpuSet& b) {
        for (int w = 0; w < W; ++w) a.words[w] &= ~b.words[w];
        return a;
    }
};

}  // namespace eplb
