// A set of small numbers, such as GPUs or experts, as a bit mask of W words.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace eplb {

template <int W>
struct BitSet {
    std::array<std::uint64_t, W> words{};

    static constexpr int capacity = 64 * W;

    static BitSet of(int member) {
        BitSet set;
        set.insert(member);
        return set;
    }
    static BitSet first(int members) {
        BitSet set;
        for (int m = 0; m < members; ++m) set.insert(m);
        return set;
    }
    static BitSet read(const std::uint64_t* from) {
        BitSet set;
        std::copy_n(from, W, set.words.begin());
        return set;
    }

    void insert(int member) { words[member >> 6] |= std::uint64_t{1} << (member & 63); }
    void insert_if(int member, bool condition) {
        words[member >> 6] |= static_cast<std::uint64_t>(condition) << (member & 63);
    }
    void erase(int member) { words[member >> 6] &= ~(std::uint64_t{1} << (member & 63)); }
    bool contains(int member) const { return words[member >> 6] >> (member & 63) & 1; }
    bool empty() const {
        std::uint64_t any = 0;
        for (const std::uint64_t w : words) any |= w;
        return any == 0;
    }
    int count() const {
        int members = 0;
        for (const std::uint64_t w : words) members += std::popcount(w);
        return members;
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
    // Every subset that is not empty.
    template <class Visit>
    void each_subset(Visit&& visit) const {
        std::array<BitSet, 64> members;
        int size = 0;
        each([&](int e) { members[size++] = of(e); });
        for (std::uint64_t chosen = 1; chosen >> size == 0; ++chosen) {
            BitSet subset;
            for (int i = 0; i < size; ++i)
                if (chosen >> i & 1) subset |= members[i];
            visit(subset);
        }
    }
    void unite_if(const BitSet& o, bool condition) {
        const std::uint64_t mask = -static_cast<std::uint64_t>(condition);
        for (int w = 0; w < W; ++w) words[w] |= o.words[w] & mask;
    }
    BitSet& operator|=(const BitSet& o) {
        for (int w = 0; w < W; ++w) words[w] |= o.words[w];
        return *this;
    }
    BitSet& operator&=(const BitSet& o) {
        for (int w = 0; w < W; ++w) words[w] &= o.words[w];
        return *this;
    }
    BitSet operator~() const {
        BitSet rest;
        for (int w = 0; w < W; ++w) rest.words[w] = ~words[w];
        return rest;
    }
    friend BitSet operator|(BitSet a, const BitSet& b) { return a |= b; }
    friend BitSet operator&(BitSet a, const BitSet& b) { return a &= b; }
    friend BitSet operator-(BitSet a, const BitSet& b) {
        for (int w = 0; w < W; ++w) a.words[w] &= ~b.words[w];
        return a;
    }
    friend bool operator==(const BitSet&, const BitSet&) = default;
};

}  // namespace eplb
