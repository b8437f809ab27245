// One problem without what has no choice: live experts with one candidate are folded into their
// GPU's load, the others keep their options.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "placement.hpp"
#include "pricing.hpp"
#include "problem.hpp"

namespace eplb {

// An expert's candidate replica. `expert` counts those with a choice only.
struct Option {
    std::int32_t gpu, slot, expert;
};

class Choices {
  public:
    // What has no choice; first. The tokens are acceptable to the layer. Keeps its memory from problem to problem.
    void fix(const Layer& layer, const std::int64_t* tokens, const Pricing& pricing) {
        fixed_.assign(layer.gpus, {});
        for (const SingleCopy& e : layer.singles)
            fixed_[e.only.gpu] += pricing.replica(static_cast<double>(tokens[e.expert]));
    }
    // The same as a matching has it, where activations and tokens say all.
    template <class Matching>
    void fix(const Matching& matching, int gpus) {
        fixed_.resize(gpus);
        for (int g = 0; g < gpus; ++g) fixed_[g] = load_of(matching.fixed(g));
    }
    // What has one.
    void read(const Layer& layer, const std::int64_t* tokens) {
        if (options_.size() < layer.candidates.size())
            options_.resize(layer.candidates.size()), by_gpu_.resize(layer.candidates.size());
        if (demand_.size() < static_cast<std::size_t>(layer.experts))
            demand_.resize(layer.experts), first_.resize(layer.experts + 1);
        end_.assign(layer.gpus + 1, 0);
        std::int32_t experts = 0, options = 0;
        const auto add = [&](std::int32_t expert, const auto& candidates) {
            if (tokens[expert] == 0) return;
            first_[experts] = options;
            most_copies_ = static_cast<int>(candidates.size());  // they come by rising number of candidates
            for (const Candidate c : candidates) options_[options++] = {c.gpu, c.slot, experts}, ++end_[c.gpu + 1];
            demand_[experts++] = static_cast<double>(tokens[expert]);
        };
        most_copies_ = 0;
        for (const TwoCopies& e : layer.pairs) add(e.expert, std::array{e.low, e.high});
        for (const std::int32_t e : layer.others) add(e, layer.candidates_of(e));
        first_[experts] = options;
        experts_ = experts, count_ = options;

        // Counting sort by GPU.
        for (int g = 0; g < layer.gpus; ++g) end_[g + 1] += end_[g];
        for (std::int32_t o = 0; o < options; ++o) by_gpu_[end_[options_[o].gpu]++] = o;
    }

    int gpus() const { return static_cast<int>(fixed_.size()); }
    int experts() const { return experts_; }
    std::int32_t options() const { return count_; }
    int most_copies() const { return most_copies_; }  // options of an expert
    const Option& option(std::int32_t o) const { return options_[o]; }
    double demand(int expert) const { return demand_[expert]; }
    // The options of an expert are first(expert) to first(expert + 1), by GPU.
    std::int32_t first(int expert) const { return first_[expert]; }
    // The expert's option on a GPU that has one.
    std::int32_t option_on(int expert, int gpu) const {
        std::int32_t o = first_[expert];
        while (options_[o].gpu != gpu) ++o;
        return o;
    }
    std::span<const std::int32_t> on(int gpu) const {
        const std::int32_t begin = gpu == 0 ? 0 : end_[gpu - 1];
        return std::span(by_gpu_).subspan(begin, end_[gpu] - begin);
    }
    const Load& fixed(int gpu) const { return fixed_[gpu]; }
    // Tokens by option to where they are routed, by slot.
    void write(const std::vector<double>& tokens, std::int64_t* routed) const {
        for (std::int32_t o = 0; o < options(); ++o)
            routed[options_[o].slot] = static_cast<std::int64_t>(tokens[o]);
    }
    // And back.
    const std::vector<double>& read_routed(const std::int64_t* routed, std::vector<double>& tokens) const {
        tokens.resize(options());
        for (std::int32_t o = 0; o < options(); ++o) tokens[o] = static_cast<double>(routed[options_[o].slot]);
        return tokens;
    }

  private:
    std::int32_t experts_ = 0, count_ = 0;  // of options: the vectors keep their longest length
    std::vector<Option> options_;
    std::vector<std::int32_t> first_, by_gpu_, end_;
    std::vector<double> demand_;
    std::vector<Load> fixed_;
    int most_copies_ = 0;
};

}  // namespace eplb
