// Whether a problem can be within a target makespan, by one search or another.
#pragma once

#include <cstdint>
#include <vector>

#include "branching.hpp"
#include "choices.hpp"
#include "placement.hpp"
#include "pricing.hpp"

namespace eplb {

// A `Search` decides whether what has a choice fits into the target's caps beside what has none. If it does,
// `routed` is how. Of an objective without curves.
template <class Search>
Verdict fit(const Pricing& pricing, const Layer& layer, const std::int64_t* tokens, std::int64_t* routed,
            double target, std::int64_t max_work) {
    Choices choices;
    choices.fix(layer, tokens, pricing);
    choices.read(layer, tokens);
    std::vector<Caps> left;
    for (int g = 0; g < layer.gpus; ++g) {
        const Caps caps = pricing.caps(g, target);
        left.push_back({caps.activated - choices.fixed(g).activated, caps.tokens - choices.fixed(g).tokens});
    }
    Search search(choices);
    const Verdict verdict = search.decide(left, pricing.split(), max_work);
    if (verdict == Verdict::fits) choices.write(search.tokens(), routed);
    return verdict;
}

}  // namespace eplb
