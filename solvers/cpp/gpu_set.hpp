// A set of GPUs as a bit mask of W words.
#pragma once

#include <bit>

#include "bit_set.hpp"

namespace eplb {

// Words of the sets for so many GPUs: 1, 2, 4, 8 or 16, the widths that solvers are compiled for.
constexpr int set_words(int gpus) { return static_cast<int>(std::bit_ceil((gpus + 63u) / 64u)); }

template <int W>
using GpuSet = BitSet<W>;

}  // namespace eplb
