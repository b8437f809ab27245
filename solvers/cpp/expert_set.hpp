// A set of experts as a bit mask of W words.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace eplb {

template <int W>
struct ExpertSet {
    std::array<std::uint64_t, W> words{};

    static constexpr int capacity = 64 * W;

    static ExpertSet of(int expert) {
        ExpertSet set;
        set.words[expert >> 6] = std::uint64_t{1} << (expert & 63);
        return set;
    }
    static ExpertSet first(int experts) {
        ExpertSet set;
        for (int e = 0; e < experts; ++e) set |= of(e);
        return set;
    }
    bool contains(int expert) const { return words[expert >> 6] >> (expert & 63) & 1; }
    explicit operator bool() const {
        std::uint64_t any = 0;
        for (const std::uint64_t w : words) any |= w;
        return any != 0;
    }
    int count() const {
        int members = 0;
        for (const std::uint64_t w : words) members += std::popcount(w);
        return members;
    }
    template <class Visit>
    void each(Visit&& visit) const {
        for (int w = 0; w < W; ++w)
            for (std::uint64_t rest = words[w]; rest != 0; rest &= rest - 1)
                visit(64 * w + std::countr_zero(rest));
    }
    // Every subset that is not empty.
    template <class Visit>
    void each_subset(Visit&& visit) const {
        std::array<ExpertSet, 64> members;
        int size = 0;
        each([&](int e) { members[size++] = of(e); });
        for (std::uint64_t chosen = 1; chosen >> size == 0; ++chosen) {
            ExpertSet subset;
            for (int i = 0; i < size; ++i)
                if (chosen >> i & 1) subset |= members[i];
            visit(subset);
        }
    }
    ExpertSet& operator|=(const ExpertSet& o) {
        for (int w = 0; w < W; ++w) words[w] |= o.words[w];
        return *this;
    }
    ExpertSet& operator&=(const ExpertSet& o) {
        for (int w = 0; w < W; ++w) words[w] &= o.words[w];
        return *this;
    }
    ExpertSet operator~() const {
        ExpertSet rest;
        for (int w = 0; w < W; ++w) rest.words[w] = ~words[w];
        return rest;
    }
    friend ExpertSet operator|(ExpertSet a, const ExpertSet& b) { return a |= b; }
    friend ExpertSet operator&(ExpertSet a, const ExpertSet& b) { return a &= b; }
    friend bool operator==(const ExpertSet&, const ExpertSet&) = default;
};

}  // namespace eplb
