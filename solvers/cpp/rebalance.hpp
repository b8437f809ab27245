// Local search for a routing within a target time: moves and swaps off the slowest GPUs, as ejection
// chains.
//
// The overflow of a GPU is its time above the target (see SimplePrice::over); the search lowers the sum. A link
// moves tokens of an expert from an overfull GPU to another of its options: all that it has there, just enough to
// end the overflow, or as much as the other GPU has room for. If the other GPU then overflows more than was
// gained, a chain goes on there, up to four links deep, back to the first GPU allowed; a chain that does
// not gain is undone. Chains of one link are tried first on all overfull GPUs, the slowest first, then
// of two, and so on. Deterministic; the work is counted in links tried.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "choices.hpp"

namespace eplb {

// Up to two pieces without tiles, the same for all GPUs: what most objectives are, and fast.
class SimplePrice {
  public:
    struct Sum {
        double activated, tokens;
        Sum& operator+=(const Sum& o) { return activated += o.activated, tokens += o.tokens, *this; }
        Sum& operator-=(const Sum& o) { return activated -= o.activated, tokens -= o.tokens, *this; }
    };

    void bind(const Pricing& pricing) {
        a_ = pricing.pieces().front(), b_ = pricing.pieces().back(), slowness_ = pricing.slowness(0);
    }
    void aim(double target) {
        target_ = target / slowness_;
        over_a_ = over_of(a_), over_b_ = over_of(b_);
    }

    static Sum sum(const Load& load) { return {load.activated, load.tokens}; }
    // What a replica adds to its GPU's sum, going from so many tokens to so many.
    static Sum change(double before, double after) {
        return {(after > 0 ? 1.0 : 0.0) - (before > 0 ? 1.0 : 0.0), after - before};
    }
    double time(int, const Sum& s) const { return slowness_ * std::max(piece(a_, s), piece(b_, s)); }
    double over(int, const Sum& s) const { return std::max(0.0, std::max(piece(over_a_, s), piece(over_b_, s))); }

    // The most tokens, up to `limit`, that a replica with x more on a GPU with `s` may take; as an
    // estimate that is never more than a token off.
    double room(int, const Sum& s, double x, double limit) const {
        const double activated = s.activated + (x == 0);
        for (const Piece& p : {a_, b_}) {
            const double rest = target_ - (p.offset + p.activation * activated) - p.token * s.tokens;
            if (rest < 0) return 0;
            if (rest < p.token * limit) limit = static_cast<double>(static_cast<std::int64_t>(rest / p.token));
        }
        return limit;
    }
    // The fewest tokens, up to x, that a replica with x must lose to end the overflow; as good.
    double excess(int, const Sum& s, double x) const {
        double least = 0;
        for (const Piece& p : {a_, b_}) {
            const double excess = (p.offset + p.activation * s.activated) + p.token * s.tokens - target_;
            if (excess > 0)
                least = excess < p.token * x
                            ? std::max(least, static_cast<double>(static_cast<std::int64_t>(excess / p.token) + 1))
                            : x;
        }
        return std::min(least, x);
    }

  private:
    static double piece(const Piece& p, const Sum& s) {
        return (p.offset + p.activation * s.activated) + p.token * s.tokens;
    }
    // A piece's overflow. An activation too many counts double: moving tokens in part does not cure it.
    Piece over_of(const Piece& p) const {
        const double weight = p.token > 0 ? 1 : 2;
        return {weight * (p.offset - target_), weight * p.activation, 0, weight * p.token};
    }

    Piece a_{}, b_{}, over_a_{}, over_b_{};
    double slowness_ = 1, target_ = 0;
};

// Any objective.
class AnyPrice {
  public:
    using Sum = Load;

    void bind(const Pricing& pricing) { pricing_ = &pricing; }
    void aim(double target) { target_ = target; }

    static Sum sum(const Load& load) { return load; }
    Sum change(double before, double after) const {
        Sum s = pricing_->replica(after);
        return s -= pricing_->replica(before);
    }
    double time(int gpu, const Sum& s) const { return pricing_->time(gpu, s); }
    double over(int gpu, const Sum& s) const { return std::max(0.0, time(gpu, s) - target_); }

    double room(int gpu, const Sum& s, double x, double limit) const {
        return most(limit, [&](double amount) { return time_at(gpu, s, x, x + amount) <= target_; });
    }
    double excess(int gpu, const Sum& s, double x) const {
        return x - most(x, [&](double left) { return time_at(gpu, s, x, left) <= target_; });
    }

  private:
    double time_at(int gpu, Sum s, double before, double after) const {
        return time(gpu, s += change(before, after));
    }
    // The largest integer up to `limit` that fits, 0 if none does.
    template <class Fits>
    static double most(double limit, Fits&& fits) {
        if (fits(limit)) return limit;
        double low = 0, high = limit;
        while (high - low > 1) {
            const double middle = std::floor((low + high) / 2);
            (fits(middle) ? low : high) = middle;
        }
        return low;
    }
    const Pricing* pricing_ = nullptr;
    double target_ = 0;
};

template <class Price>
class Rebalance {
  public:
    explicit Rebalance(const Choices& choices) : choices_(choices) {}

    void bind(const Pricing& pricing) {
        price_.bind(pricing);
        split_ = pricing.split();
    }

    // Starts from tokens by option that need not serve all (parts of whole experts are dropped): what is left over
    // goes, the experts with most tokens first, to the option that it makes least slow if that stays within the
    // target, and otherwise fills the roomiest options in turn.
    void start(const std::vector<double>& tokens, double target) {
        tokens_ = tokens;
        if (!split_) drop_parts();
        sum_.resize(choices_.gpus()), time_.resize(choices_.gpus());
        for (int g = 0; g < choices_.gpus(); ++g) {
            sum_[g] = Price::sum(choices_.fixed(g));
            for (const std::int32_t o : choices_.on(g)) sum_[g] += price_.change(0, tokens_[o]);
            time_[g] = price_.time(g, sum_[g]);
        }
        aim(target);
        rest_.clear();
        for (int e = 0; e < choices_.experts(); ++e) {
            double rest = choices_.demand(e);
            for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o) rest -= tokens_[o];
            if (rest > 0) rest_.push_back(static_cast<std::uint64_t>(rest) << kExpertBits | e);
        }
        std::sort(rest_.begin(), rest_.end(), std::greater<>());
        for (const std::uint64_t r : rest_)
            serve(static_cast<int>(r % (1 << kExpertBits)), static_cast<double>(r >> kExpertBits));
    }

    // Lowers the overflow over the target until there is none (true) or the work is done. Where no chain
    // helps, some random moves of whole experts are made and the descent repeated; what does not lead
    // to less overflow is taken back.
    bool lower(double target, std::int64_t max_work) {
        aim(target);
        const std::int64_t end = work_ + max_work;
        double least = descend(end);
        while (least > 0 && work_ < end) {
            kept_tokens_ = tokens_, kept_sum_ = sum_, kept_time_ = time_;
            for (int i = 0; i < kKick; ++i) kick();
            const double overflow = descend(end);
            if (overflow <= least) {
                least = overflow;
            } else {
                tokens_ = kept_tokens_, sum_ = kept_sum_, time_ = kept_time_;
            }
        }
        return makespan() <= target_;
    }
    void seed(std::uint64_t state) { random_ = state; }

    double makespan() const { return *std::max_element(time_.begin(), time_.end()); }
    const std::vector<double>& tokens() const { return tokens_; }
    std::int64_t work() const { return work_; }

  private:
    struct Link {
        double tokens, left;  // what moves, and the overflow that it leaves
    };
    static constexpr int kMostLinks = 4, kKick = 3;
    static constexpr int kExpertBits = 12;  // of kMaxExperts; the tokens take kTokenBits
    static constexpr double kGain = 1e-11;  // of the target: below what a token costs, above rounding

    void aim(double target) {
        target_ = target, gain_ = target * kGain;
        price_.aim(target);
    }
    // Chains until none gains; returns the overflow that is left.
    double descend(std::int64_t end) {
        for (;;) {
            const int slowest = static_cast<int>(std::max_element(time_.begin(), time_.end()) - time_.begin());
            if (time_[slowest] <= target_) return 0;
            bool gained = false;
            for (int links = 1; links <= kMostLinks && !gained; ++links) {
                gained = chain(slowest, over(slowest), links, end);
                for (int g = 0; g < choices_.gpus() && !gained && work_ < end; ++g)
                    if (g != slowest && time_[g] > target_) gained = chain(g, over(g), links, end);
            }
            if (gained && work_ < end) continue;
            double overflow = 0;
            for (int g = 0; g < choices_.gpus(); ++g) overflow += over(g);
            return overflow;
        }
    }
    std::uint32_t random(std::uint32_t below) {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        return static_cast<std::uint32_t>((random_ >> 32) * below >> 32);
    }
    void kick() {
        ++work_;
        const int e = random(choices_.experts());
        const std::int32_t first = choices_.first(e), count = choices_.first(e + 1) - first;
        std::int32_t from = first + random(count), to = first + random(count - 1);
        to += to >= from;
        const double x = tokens_[from];
        if (x > 0) give(from, -x), give(to, x);
    }

    double over(int g) const { return price_.over(g, sum_[g]); }
    // What an option's GPU has with so many tokens more there.
    typename Price::Sum sum_with(std::int32_t o, double amount) const {
        typename Price::Sum s = sum_[choices_.option(o).gpu];
        return s += price_.change(tokens_[o], tokens_[o] + amount);
    }
    double over_with(std::int32_t o, double amount) const {
        return price_.over(choices_.option(o).gpu, sum_with(o, amount));
    }
    double time_with(std::int32_t o, double amount) const {
        return price_.time(choices_.option(o).gpu, sum_with(o, amount));
    }
    void give(std::int32_t o, double amount) {
        const int g = choices_.option(o).gpu;
        sum_[g] = sum_with(o, amount);
        tokens_[o] += amount;
        time_[g] = price_.time(g, sum_[g]);
    }
    double room(std::int32_t o, double limit) const {
        const int g = choices_.option(o).gpu;
        return price_.room(g, sum_[g], tokens_[o], limit);
    }

    void drop_parts() {
        for (int e = 0; e < choices_.experts(); ++e) {
            const auto begin = tokens_.begin() + choices_.first(e), end = tokens_.begin() + choices_.first(e + 1);
            if (std::find(begin, end, choices_.demand(e)) == end) std::fill(begin, end, 0.0);
        }
    }
    void serve(int e, double rest) {
        for (;;) {
            std::int32_t best = -1, roomiest = -1;
            double least = kInf, most = 0;
            for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o)
                if (const double t = time_with(o, rest); t < least) least = t, best = o;
            if (split_ && least > target_)
                for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o)
                    if (const double r = room(o, rest); r > most) most = r, roomiest = o;
            if (roomiest < 0) return give(best, rest);
            give(roomiest, most);
            rest -= most;
            if (rest == 0) return;
        }
    }

    // A chain from overfull GPU g that leaves less than `allowed` overflow on g and on the GPUs that it
    // gives to, more than these have now. False and undone if there is none.
    bool chain(int g, double allowed, int links, std::int64_t end) {
        for (const std::int32_t o : choices_.on(g)) {
            const double x = tokens_[o];
            if (x == 0) continue;
            const double over_whole = over_with(o, -x);
            if (over_whole >= allowed - gain_) continue;
            const double part = split_ ? price_.excess(g, sum_[g], x) : x;
            const double over_part = part < x ? over_with(o, -part) : kInf;
            const int e = choices_.option(o).expert;
            for (std::int32_t d = choices_.first(e); d < choices_.first(e + 1); ++d) {
                if (d == o) continue;
                if (++work_ >= end) return false;
                const int to = choices_.option(d).gpu;
                const double before = over(to), most = allowed + before;
                for (const auto [amount, left] : {Link{x, over_whole}, Link{part, over_part}}) {
                    if (left >= most - gain_) continue;
                    const bool gains = left + over_with(d, amount) < most - gain_;
                    if (!gains && links == 1) continue;
                    give(o, -amount), give(d, amount);
                    if (gains || chain(to, most - left, links - 1, end)) return true;
                    give(d, -amount), give(o, amount);
                }
                if (!split_ || before > 0) continue;
                const double fits = room(d, x);
                if (fits == 0 || fits == x || fits == part) continue;
                if (over_with(o, -fits) + over_with(d, fits) >= allowed - gain_) continue;
                give(o, -fits), give(d, fits);
                return true;
            }
        }
        return false;
    }

    const Choices& choices_;
    Price price_;
    bool split_ = true;
    double target_ = 0, gain_ = 0;
    std::int64_t work_ = 0;
    std::vector<double> tokens_, time_, kept_tokens_, kept_time_;
    std::vector<std::uint64_t> rest_;  // tokens left over and their expert, in one word to sort
    std::vector<typename Price::Sum> sum_, kept_sum_;
    std::uint64_t random_ = 1;
};

}  // namespace eplb
