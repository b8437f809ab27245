// A tournament: who is first of n players stays known while their ranks change one at a time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace eplb {

// A player's rank, the least first: by a value that is not negative, rising or falling, then by `tie`, then by
// the player.
class Rank {
  public:
    static Rank rising(double value, std::int32_t player) { return {bits(value), 0, player}; }
    static Rank falling(double value, std::uint32_t tie, std::int32_t player) {
        return {~bits(value), tie, player};
    }
    static Rank last() { return {~std::uint64_t{0}, ~std::uint32_t{0}, -1}; }

    std::int32_t player() const { return static_cast<std::int32_t>(minor_); }  // -1: of last()

    // Without a branch, which compilers make of a plain choice.
    static Rank first_of(const Rank& a, const Rank& b) {
        __extension__ using Wide = unsigned __int128;
        const bool is_a = (Wide{a.major_} << 64 | a.minor_) < (Wide{b.major_} << 64 | b.minor_);
        const std::uint64_t mask = -static_cast<std::uint64_t>(is_a);
        return Rank(b.major_ ^ ((a.major_ ^ b.major_) & mask), b.minor_ ^ ((a.minor_ ^ b.minor_) & mask));
    }

  private:
    Rank(std::uint64_t major, std::uint64_t minor) : major_(major), minor_(minor) {}
    Rank(std::uint64_t major, std::uint32_t tie, std::int32_t player)
        : Rank(major, std::uint64_t{tie} << 32 | static_cast<std::uint32_t>(player)) {}
    // They rise with doubles that are not negative; + 0: no -0.
    static std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value + 0.0); }

    std::uint64_t major_, minor_;
};

// O(n) to make, O(log n) a change: a game on each level, against a rival that is known beforehand, where a heap
// chooses its way down. It takes a third to a half of a heap's time.
class Tournament {
  public:
    template <class RankOf>
    Tournament(std::int32_t players, RankOf&& rank_of)
        : leaves_(std::bit_ceil(static_cast<std::uint32_t>(players))), won_(2 * leaves_, Rank::last()) {
        for (std::int32_t i = 0; i < players; ++i) won_[leaves_ + i] = rank_of(i);
        for (std::size_t game = leaves_ - 1; game > 0; --game)
            won_[game] = Rank::first_of(won_[2 * game], won_[2 * game + 1]);
    }

    const Rank& first() const { return won_[1]; }

    void change(std::int32_t player, Rank rank) {
        std::size_t at = leaves_ + player;
        won_[at] = rank;
        for (; at > 1; at /= 2) won_[at / 2] = rank = Rank::first_of(rank, won_[at ^ 1]);
    }

  private:
    std::size_t leaves_;
    std::vector<Rank> won_;  // [2 * leaves]: game i is between the winners of 2 i and 2 i + 1
};

}  // namespace eplb
