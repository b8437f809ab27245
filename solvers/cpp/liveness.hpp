// How often experts are live in a batch, and how many of them are: what routing-aware placers read.
//
// From popularity. Each of N tokens visits k distinct experts, expert e with chance q_e, its share of the
// load times k (a share beyond 1 / k is always visited; the rest goes to the others in proportion). With d =
// sum q_e (1 - q_e), Hajek's approximation of sampling k distinct ones has Cov(e, f) = - q_e (1 - q_e) q_f
// (1 - q_f) / d within a token. Tokens are independent, so that to first order in it
//     p_e = 1 - (1 - q_e)^N,   Cov(e, f) = - u_e u_f,   u_e = sqrt(N / d) q_e (1 - q_e)^N.
// The number n of live experts then has mean sum p_e and variance sum p_e (1 - p_e) - (sum u)^2 + sum u^2;
// about half of what independent experts would have at 32 tokens, and within a tenth of what is drawn.
// From batches: means and covariances as counted.
// Time O(E^2), or O(batches x live experts^2).
//
// What a placement does to batches is averaged over n, taken as normal. Batches that leave little room at their
// floor t = ceil(n / G) decide: `totals` takes quantiles of n where those with a slack of s = t G - n count
// 1 / (1 + s), and weights each by 1 + s in turn (importance sampling).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace eplb {

struct Liveness {
    std::vector<double> live;        // [experts]: how often each is live
    std::vector<float> covariance;   // [experts, experts]
    std::vector<double> with_total;  // [experts]: covariance with the number of live experts
    double mean = 0, variance = 0;   // of that number

    std::int32_t experts() const { return static_cast<std::int32_t>(live.size()); }
    std::span<const float> row(std::int32_t e) const {
        return std::span(covariance).subspan(static_cast<std::size_t>(e) * live.size(), live.size());
    }
    // How often an expert is live in batches with `total` live ones.
    double live_given(std::int32_t e, double total) const {
        const double slope = variance > 0 ? with_total[e] / variance : 0.0;
        return std::clamp(live[e] + slope * (total - mean), 0.0, 1.0);
    }

    void sum_up() {
        const std::int32_t count = experts();
        with_total.resize(count);
        for (std::int32_t e = 0; e < count; ++e) {
            const auto of = row(e);
            with_total[e] = std::accumulate(of.begin(), of.end(), 0.0);
        }
        mean = std::accumulate(live.begin(), live.end(), 0.0);
        variance = std::max(0.0, std::accumulate(with_total.begin(), with_total.end(), 0.0));
    }
};

// A number of live experts, its floor, and the share of batches that it stands for.
struct Total {
    double live = 0, floor = 0, weight = 0;
};

template <std::size_t Count>
std::array<Total, Count> totals(const Liveness& of, std::int32_t gpus) {
    const double reach = 4 * std::sqrt(of.variance);
    std::vector<Total> every;
    double all = 0, urgent = 0;
    const auto room = [&](const Total& t) { return 1 + t.floor * gpus - t.live; };
    const double last = std::min(of.mean + reach + 0.5, static_cast<double>(of.experts()));
    for (double n = std::max(0.0, std::round(of.mean - reach)); n <= last; ++n) {
        const double z = reach > 0 ? 4 * (n - of.mean) / reach : 0.0;
        every.push_back({n, std::ceil(n / gpus), std::exp(-0.5 * z * z)});
        all += every.back().weight, urgent += every.back().weight / room(every.back());
    }
    std::array<Total, Count> chosen;
    std::size_t q = 0;
    double passed = 0;
    for (const Total& t : every) {
        passed += t.weight / room(t);
        for (; q < Count && passed * Count >= urgent * (static_cast<double>(q) + 0.5); ++q)
            chosen[q] = {t.live, t.floor, urgent / all * room(t) / Count};
    }
    return chosen;
}

// The chance that a token visits each expert; a layer without load is visited evenly.
inline std::vector<double> visits(std::span<const double> load, std::int32_t top_k) {
    const std::size_t experts = load.size();
    std::vector<double> chance(experts, 0.0);
    std::vector<bool> sure(experts, false);
    for (bool over = true; over;) {
        over = false;
        double rest = 0, left = top_k;
        std::size_t open = 0;
        for (std::size_t e = 0; e < experts; ++e) {
            rest += sure[e] ? 0.0 : load[e];
            left -= sure[e];
            open += !sure[e];
        }
        for (std::size_t e = 0; e < experts; ++e) {
            if (sure[e]) continue;
            chance[e] = rest > 0 ? left * (load[e] / rest) : left / static_cast<double>(open);
            if (chance[e] < 1) continue;
            chance[e] = 1, sure[e] = over = true;
        }
    }
    return chance;
}

inline Liveness liveness_of_loads(std::span<const double> load, std::int64_t tokens, std::int32_t top_k) {
    const std::vector<double> chance = visits(load, top_k);
    const std::size_t experts = load.size();
    const auto count = static_cast<double>(tokens);
    double d = 0;
    for (const double q : chance) d += q * (1 - q);
    Liveness of;
    of.live.resize(experts);
    of.covariance.resize(experts * experts);
    std::vector<double> u(experts, 0.0);
    for (std::size_t e = 0; e < experts; ++e) {
        const double never = chance[e] < 1 ? std::exp(count * std::log1p(-chance[e])) : 0.0;
        of.live[e] = 1 - never;
        if (d > 0) u[e] = std::sqrt(count / d) * chance[e] * never;
    }
    for (std::size_t e = 0; e < experts; ++e)
        for (std::size_t f = 0; f < experts; ++f)
            of.covariance[e * experts + f] =
                static_cast<float>(e == f ? of.live[e] * (1 - of.live[e]) : -u[e] * u[f]);
    of.sum_up();
    return of;
}

// `tokens` is [batches, experts].
inline Liveness liveness_of_batches(std::span<const std::int64_t> tokens, std::size_t experts) {
    const std::size_t batches = tokens.size() / experts;
    Liveness of;
    of.live.assign(experts, 0.0);
    std::vector<double> both(experts * experts, 0.0);
    std::vector<std::size_t> live;
    for (std::size_t b = 0; b < batches; ++b) {
        live.clear();
        for (std::size_t e = 0; e < experts; ++e)
            if (tokens[b * experts + e] > 0) live.push_back(e);
        for (const std::size_t e : live) {
            ++of.live[e];
            for (const std::size_t f : live) ++both[e * experts + f];
        }
    }
    const auto count = static_cast<double>(batches);
    for (double& p : of.live) p /= count;
    of.covariance.resize(experts * experts);
    for (std::size_t e = 0; e < experts; ++e)
        for (std::size_t f = 0; f < experts; ++f)
            of.covariance[e * experts + f] =
                static_cast<float>(both[e * experts + f] / count - of.live[e] * of.live[f]);
    of.sum_up();
    return of;
}

}  // namespace eplb
