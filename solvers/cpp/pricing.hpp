// What a GPU's time is: the objective, as the makespan search and its bounds evaluate it.
//
// time = slowness * max over pieces of (((offset + activation A) + tile T) + token N), in doubles and
// in this order, so that the Python package finds the same number to the bit (compiled without
// contraction to fused multiply-adds). A curve, the measured time of one replica over its tokens, is
// a further piece: the sum over the GPU's replicas. Counts are doubles: they stay below 2^53.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "problem.hpp"

namespace eplb {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kBelow = 1 - 1e-12;  // what is added up in another order may round down

struct Piece {
    double offset, activation, tile, token;
};

// Rows of rising tokens; linear between them, flat below the first, and above the last as between the
// last two.
struct Curve {
    std::vector<double> tokens, times;

    bool empty() const { return tokens.empty(); }
    double time(double x) const {
        if (x <= 0) return 0;
        const auto above = std::upper_bound(tokens.begin(), tokens.end(), x) - tokens.begin();
        const auto last = static_cast<std::ptrdiff_t>(tokens.size()) - 2;
        const auto row = std::clamp<std::ptrdiff_t>(above - 1, 0, last);
        const double slope = (times[row + 1] - times[row]) / (tokens[row + 1] - tokens[row]);
        return times[row] + slope * std::max(x - tokens[row], 0.0);
    }
    // The least time per token at any number of tokens: time / tokens is monotone between rows, so it
    // is least at a row or without end.
    double least_per_token() const {
        const std::size_t last = tokens.size() - 1;
        double least = (times[last] - times[last - 1]) / (tokens[last] - tokens[last - 1]);
        for (std::size_t i = 0; i <= last; ++i) least = std::min(least, times[i] / tokens[i]);
        return least;
    }
};

// A GPU's activated replicas, tiles and tokens, and its replicas' times on the curve, summed.
struct Load {
    double activated = 0, tiles = 0, tokens = 0, curved = 0;

    Load& operator+=(const Load& o) {
        activated += o.activated, tiles += o.tiles, tokens += o.tokens, curved += o.curved;
        return *this;
    }
    Load& operator-=(const Load& o) {
        activated -= o.activated, tiles -= o.tiles, tokens -= o.tokens, curved -= o.curved;
        return *this;
    }
};

inline Load load_of(Fill fill) {
    return {static_cast<double>(activated_in(fill)), 0, static_cast<double>(tokens_in(fill)), 0};
}

// The most activated replicas and tokens of a GPU that a target time can allow.
struct Caps {
    double activated, tokens;
};

class Pricing {
  public:
    static constexpr double kMostActivated = 4096, kMostTokens = 9007199254740992.0;  // experts; 2^53

    // `slowness` has one entry per GPU; `curve` may be empty.
    Pricing(std::vector<Piece> pieces, Curve curve, double tile_tokens, std::vector<double> slowness, bool split)
        : pieces_(std::move(pieces)),
          curve_(std::move(curve)),
          tile_tokens_(tile_tokens),
          slowness_(std::move(slowness)),
          split_(split),
          uniform_(std::all_of(slowness_.begin(), slowness_.end(),
                               [this](double s) { return s == slowness_.front(); })),
          tiled_(std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& p) { return p.tile > 0; })),
          per_token_(curve_.empty() ? 0.0 : curve_.least_per_token() * kBelow) {}

    double time(int gpu, const Load& load) const {
        double most = load.curved;
        for (const Piece& p : pieces_)
            most = std::max(
                most, ((p.offset + p.activation * load.activated) + p.tile * load.tiles) + p.token * load.tokens);
        return slowness_[gpu] * most;
    }
    // What a replica with x tokens adds to its GPU.
    Load replica(double x) const {
        if (counted()) return {x > 0 ? 1.0 : 0.0, 0.0, x, 0.0};
        return {x > 0 ? 1.0 : 0.0, tiled_ ? std::ceil(x / tile_tokens_) : 0.0, x,
                curve_.empty() ? 0.0 : curve_.time(x)};
    }

    // The time of the slowest GPU, whose replicas have these tokens, [gpus, slots_per_gpu].
    double slowest(const std::int64_t* routed, std::int32_t slots_per_gpu) const {
        double most = 0;
        for (int g = 0; g < gpus(); ++g, routed += slots_per_gpu) {
            const std::span mine(routed, slots_per_gpu);
            Load load;
            if (counted()) {
                std::uint64_t activated = 0;
                std::int64_t tokens = 0;
                for (const std::int64_t x : mine) activated += sign_of(-x), tokens += x;
                load.activated = static_cast<double>(activated);
                load.tokens = static_cast<double>(tokens);
            } else {
                for (const std::int64_t x : mine) load += replica(static_cast<double>(x));
            }
            most = std::max(most, time(g, load));
        }
        return most;
    }

    // The same of loads, load_of(gpu).
    template <class LoadOf>
    double slowest(LoadOf&& load_of) const {
        double most = 0;
        if (uniform_ && counted()) {
            for (int g = 0; g < gpus(); ++g) {
                const Load load = load_of(g);
                for (const Piece& p : pieces_)
                    most = std::max(most, (p.offset + p.activation * load.activated) + p.token * load.tokens);
            }
            return slowness_[0] * most;
        }
        for (int g = 0; g < gpus(); ++g) most = std::max(most, time(g, load_of(g)));
        return most;
    }

    // The least time of a GPU with so many activated replicas: each has a token and a tile.
    double time_of_activated(int gpu, double count) const {
        double curved = 0;
        if (!curve_.empty() && curve_.times.front() > 0)  // one by one, as replicas are summed
            for (double i = 0; i < count; ++i) curved += curve_.times.front();
        return time(gpu, {count, tiled_ ? count : 0.0, count, curved});
    }
    // The least time of a GPU with so many tokens: they may share one replica, and fill its tiles.
    double time_of_tokens(int gpu, double count) const {
        const double tiles = tiled_ ? std::ceil(count / tile_tokens_) : 0.0;
        const double curved =
            curve_.empty() || count == 0 ? 0.0 : std::max(curve_.times.front(), count * per_token_);
        return time(gpu, {count > 0 ? 1.0 : 0.0, tiles, count, curved});
    }
    // Any routing with every GPU's time at most `target` is within these; kMost where it is unlimited.
    Caps caps(int gpu, double target) const {
        Caps about{kMostActivated, kMostTokens};  // exact but for rounding, tiles and the curve
        for (const Piece& p : pieces_) {
            const double left = target / slowness_[gpu] - p.offset;
            if (p.activation > 0) about.activated = std::min(about.activated, std::floor(left / p.activation));
            if (p.token > 0) about.tokens = std::min(about.tokens, std::floor((left - p.activation) / p.token));
        }
        return {
            most([&](double n) { return time_of_activated(gpu, n) <= target; }, kMostActivated, about.activated),
            most([&](double n) { return time_of_tokens(gpu, n) <= target; }, kMostTokens, about.tokens)};
    }
    // The least time of a GPU that is not within its caps at `target`.
    double beyond(int gpu, const Caps& caps) const {
        const double a = caps.activated < kMostActivated ? time_of_activated(gpu, caps.activated + 1) : kInf;
        const double n = caps.tokens < kMostTokens ? time_of_tokens(gpu, caps.tokens + 1) : kInf;
        return std::min(a, n);
    }

    bool curved() const { return !curve_.empty(); }
    int gpus() const { return static_cast<int>(slowness_.size()); }
    bool uniform() const { return uniform_; }
    bool split() const { return split_; }
    // Whether activated replicas and tokens say all.
    bool counted() const { return !tiled_ && curve_.empty(); }
    // Whether at most two pieces decide, without tiles, curve or differences between GPUs.
    bool simple() const { return uniform_ && counted() && pieces_.size() <= 2; }
    // Whether a piece counts more than activations alone or tokens alone, or GPUs differ.
    bool mixed() const {
        const auto several = [](const Piece& p) { return p.tile > 0 || (p.activation > 0 && p.token > 0); };
        return !uniform_ || std::any_of(pieces_.begin(), pieces_.end(), several);
    }
    const std::vector<Piece>& pieces() const { return pieces_; }
    // The time of an activated replica on the fastest GPU.
    double step() const {
        double most = 0;
        for (const Piece& p : pieces_) most = std::max(most, p.activation);
        return most * *std::min_element(slowness_.begin(), slowness_.end());
    }
    double slowness(int gpu) const { return slowness_[gpu]; }

  private:
    // The largest integer from -1 to `limit` that fits; fitting ends once, as a rule near `about`.
    template <class Fits>
    static double most(Fits&& fits, double limit, double about) {
        for (const double n : {about, about - 1, about + 1})
            if (n >= 0 && n < limit && fits(n) && !fits(n + 1)) return n;
        if (!fits(0)) return -1;
        double low = 0, high = 1;
        for (; fits(high); low = high, high *= 2)
            if (high >= limit) return limit;
        while (high - low > 1) {
            const double middle = std::floor((low + high) / 2);
            (fits(middle) ? low : high) = middle;
        }
        return low;
    }

    std::vector<Piece> pieces_;
    Curve curve_;
    double tile_tokens_;
    std::vector<double> slowness_;
    bool split_, uniform_, tiled_;
    double per_token_;
};

}  // namespace eplb
