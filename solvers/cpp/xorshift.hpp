// Random numbers for searches, the same on every machine (G. Marsaglia, "Xorshift RNGs", 2003).
#pragma once

#include <cstdint>

namespace eplb {

class Xorshift {
  public:
    static constexpr std::uint64_t kSeed = 0x9E3779B97F4A7C15;

    explicit Xorshift(std::uint64_t seed = kSeed) : state_(seed) {}  // not 0

    // Below `limit`, each about as likely.
    std::uint32_t below(std::uint32_t limit) {
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return static_cast<std::uint32_t>((state_ >> 32) * limit >> 32);
    }

  private:
    std::uint64_t state_;
};

}  // namespace eplb
