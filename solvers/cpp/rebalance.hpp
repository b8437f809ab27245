// Local search for a routing within a target time: moves and swaps off the slowest GPUs, as ejection
// chains.
//
// The overflow of a GPU is its time above the target (see SimplePrice); the search lowers the sum. A link
// moves tokens of an expert from an overfull GPU to another of its options: all that it has there, just enough to
// end the overflow, or as much as the other GPU has room for. If the other GPU then overflows more than was
// gained, a chain goes on there, up to four links deep, back to the first GPU allowed; a chain that does
// not gain is undone. Chains of one link are tried first on all overfull GPUs, in order, then with the slowest
// first, then of two, and so on. Deterministic; the work is counted in links tried.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "choices.hpp"
#include "xorshift.hpp"

namespace eplb {

// Up to two pieces without tiles, the same for all GPUs: what most objectives are, and fast.
//
// A price keeps, for every GPU, what it has, and what follows from that at the target: its time and its overflow,
// once settled. Of a replica that has so many tokens, `with` is said of x that come and `without` of x that leave.
class SimplePrice {
  public:
    struct Gpu {
        double activated, tokens, time;
        double a, b, over;  // by how much the two pieces are above the target, and the GPU; pieces may be below
    };

    void bind(const Pricing& pricing) {
        slowness_ = pricing.slowness(0);
        a_ = Line(pricing.pieces().front()), b_ = Line(pricing.pieces().back());
    }
    void aim(double target) { target_ = target / slowness_; }

    static void set(Gpu& gpu, const Load& load) { gpu.activated = load.activated, gpu.tokens = load.tokens; }
    // A replica goes from so many tokens to so many.
    static void change(Gpu& gpu, double before, double after) {
        gpu.activated += (after > 0 ? 1.0 : 0.0) - (before > 0 ? 1.0 : 0.0);
        gpu.tokens += after - before;
    }
    void settle(int, Gpu& gpu) const {
        const double a = a_.at(gpu.activated, gpu.tokens), b = b_.at(gpu.activated, gpu.tokens);
        gpu.time = slowness_ * std::max(a, b);
        gpu.a = a_.weight * (a - target_), gpu.b = b_.weight * (b - target_);
        gpu.over = over(gpu.a, gpu.b);
    }
    double time_with(int, const Gpu& gpu, double had, double x) const {
        const double activated = gpu.activated + (had == 0), tokens = gpu.tokens + x;
        return slowness_ * std::max(a_.at(activated, tokens), b_.at(activated, tokens));
    }
    double over_with(int, const Gpu& gpu, double had, double x) const {
        const double more = had == 0;
        return over(gpu.a + a_.over_of(more, x), gpu.b + b_.over_of(more, x));
    }
    double over_without(int, const Gpu& gpu, double had, double x) const {
        const double less = had == x;
        return over(gpu.a - a_.over_of(less, x), gpu.b - b_.over_of(less, x));
    }
    // The most tokens, up to `limit`, that may come within the target; as an estimate, never more than a token
    // off.
    double room(int, const Gpu& gpu, double had, double limit) const {
        const double activated = gpu.activated + (had == 0);
        return std::min({limit, a_.tokens(target_ - a_.at(activated, gpu.tokens)),
                         b_.tokens(target_ - b_.at(activated, gpu.tokens))});
    }
    // The fewest, of all x that a replica has, that must leave to end the overflow; as good.
    double excess(int, const Gpu& gpu, double x) const {
        return std::min(x, std::max(a_.excess(gpu.a), b_.excess(gpu.b)));
    }

  private:
    struct Line {
        double offset = 0, activation = 0, token = 0, weight = 1, per_token = 0;
        double over_activation = 0, over_token = 0;  // weighted

        Line() = default;
        // An activation too many counts double: moving tokens in part does not cure it.
        explicit Line(const Piece& p)
            : offset(p.offset),
              activation(p.activation),
              token(p.token),
              weight(p.token > 0 ? 1 : 2),
              per_token(p.token > 0 ? 1 / p.token : 0),
              over_activation(weight * activation),
              over_token(weight * token) {}
        double at(double activated, double tokens) const {
            return (offset + activation * activated) + token * tokens;
        }
        double over_of(double activated, double tokens) const {
            return over_activation * activated + over_token * tokens;
        }
        double tokens(double time) const {
            if (time < 0) return 0;
            return token > 0 ? static_cast<double>(static_cast<std::int64_t>(std::min(time * per_token, kMost)))
                             : kMost;
        }
        double excess(double over) const { return over <= 0 ? 0 : token > 0 ? tokens(over) + 1 : kMost; }
    };
    static constexpr double kMost = 9007199254740992.0;  // 2^53

    static double over(double a, double b) { return std::max(0.0, std::max(a, b)); }

    Line a_, b_;
    double slowness_ = 1, target_ = 0;
};

// Any objective.
class AnyPrice {
  public:
    struct Gpu {
        Load load;
        double time, over;
    };

    void bind(const Pricing& pricing) { pricing_ = &pricing; }
    void aim(double target) { target_ = target; }

    static void set(Gpu& gpu, const Load& load) { gpu.load = load; }
    void change(Gpu& gpu, double before, double after) const {
        gpu.load += pricing_->replica(after);
        gpu.load -= pricing_->replica(before);
    }
    void settle(int g, Gpu& gpu) const {
        gpu.time = pricing_->time(g, gpu.load), gpu.over = std::max(0.0, gpu.time - target_);
    }
    double time_with(int g, const Gpu& gpu, double had, double x) const { return time_of(g, gpu, had, had + x); }
    double over_with(int g, const Gpu& gpu, double had, double x) const {
        return std::max(0.0, time_of(g, gpu, had, had + x) - target_);
    }
    double over_without(int g, const Gpu& gpu, double had, double x) const {
        return std::max(0.0, time_of(g, gpu, had, had - x) - target_);
    }
    double room(int g, const Gpu& gpu, double had, double limit) const {
        return most(limit, [&](double x) { return time_of(g, gpu, had, had + x) <= target_; });
    }
    double excess(int g, const Gpu& gpu, double x) const {
        return x - most(x, [&](double left) { return time_of(g, gpu, x, left) <= target_; });
    }

  private:
    double time_of(int g, Gpu gpu, double before, double after) const {
        change(gpu, before, after);
        return pricing_->time(g, gpu.load);
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
        gpus_.resize(choices_.gpus());
        active_.resize(static_cast<std::size_t>(kMostLinks) * choices_.options());
        for (int g = 0; g < choices_.gpus(); ++g) price_.set(gpus_[g], choices_.fixed(g));
        aim(target);
        rest_.clear();
        for (int e = 0; e < choices_.experts(); ++e) {
            double rest = choices_.demand(e);
            for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o)
                if (tokens_[o] > 0) {
                    price_.change(gpus_[choices_.option(o).gpu], 0, tokens_[o]);
                    rest -= tokens_[o];
                }
            if (rest > 0) rest_.push_back(static_cast<std::uint64_t>(rest) << kExpertBits | e);
        }
        std::sort(rest_.begin(), rest_.end(), std::greater<>());
        for (const std::uint64_t r : rest_)
            serve(static_cast<int>(r % (1 << kExpertBits)), static_cast<double>(r >> kExpertBits));
        settle();
        makespan_ = gpus_[slowest()].time;
    }

    // Lowers the overflow over the target until there is none (true) or the work is done. Where no chain
    // helps, some random moves of whole experts are made and the descent repeated; what does not lead
    // to less overflow is taken back.
    bool lower(double target, std::int64_t max_work) {
        if (target != target_) aim(target), settle();
        const std::int64_t end = work_ + max_work;
        double least = descend(end);
        while (least > 0 && work_ < end) {
            kept_tokens_ = tokens_, kept_gpus_ = gpus_;
            for (int i = 0; i < kKick; ++i) kick();
            const double overflow = descend(end);
            if (overflow <= least) {
                least = overflow;
            } else {
                tokens_ = kept_tokens_, gpus_ = kept_gpus_;
            }
        }
        makespan_ = gpus_[slowest()].time;
        return makespan_ <= target_;
    }
    void seed() { random_ = Xorshift(); }

    double makespan() const { return makespan_; }
    const std::vector<double>& tokens() const { return tokens_; }
    std::int64_t work() const { return work_; }

  private:
    using Gpu = typename Price::Gpu;
    struct Link {
        double tokens, left;  // what moves, and the overflow that it leaves
    };
    static constexpr int kMostLinks = 4, kKick = 3;
    static constexpr int kExpertBits = 12;  // of kMaxExperts; the tokens take kTokenBits
    static constexpr double kGain = 1e-11;  // of the target: below what a token costs, above rounding

    int slowest() const {
        int slowest = 0;
        double most = gpus_[0].time;
        for (int g = 1; g < choices_.gpus(); ++g)
            if (const double time = gpus_[g].time; time > most) most = time, slowest = g;
        return slowest;
    }
    void aim(double target) {
        target_ = target, gain_ = target * kGain;
        price_.aim(target);
    }
    void settle() {
        for (int g = 0; g < choices_.gpus(); ++g) price_.settle(g, gpus_[g]);
    }
    // Chains until none gains; returns the overflow that is left.
    double descend(std::int64_t end) {
        for (int g = 0; g < choices_.gpus(); ++g)
            while (gpus_[g].time > target_ && work_ < end && chain(g, gpus_[g].over, 1, end)) {
            }
        for (;;) {
            const int first = slowest();
            if (gpus_[first].time <= target_) return 0;
            bool gained = false;
            for (int links = 1; links <= kMostLinks && !gained; ++links) {
                gained = chain(first, gpus_[first].over, links, end);
                for (int g = 0; g < choices_.gpus() && !gained && work_ < end; ++g)
                    if (g != first && gpus_[g].time > target_) gained = chain(g, gpus_[g].over, links, end);
            }
            if (gained && work_ < end) continue;
            double overflow = 0;
            for (const Gpu& gpu : gpus_) overflow += gpu.over;
            return overflow;
        }
    }
    void kick() {
        ++work_;
        const int e = static_cast<int>(random_.below(choices_.experts()));
        const std::int32_t first = choices_.first(e), count = choices_.first(e + 1) - first;
        std::int32_t from = first + static_cast<std::int32_t>(random_.below(count)),
                     to = first + static_cast<std::int32_t>(random_.below(count - 1));
        to += to >= from;
        const double x = tokens_[from];
        if (x > 0) give(from, -x), give(to, x);
    }

    // `settle` follows.
    void put(std::int32_t o, double amount) {
        const double before = std::exchange(tokens_[o], tokens_[o] + amount);
        price_.change(gpus_[choices_.option(o).gpu], before, tokens_[o]);
    }
    void give(std::int32_t o, double amount) {
        const int g = choices_.option(o).gpu;
        put(o, amount);
        price_.settle(g, gpus_[g]);
    }

    void drop_parts() {
        for (int e = 0; e < choices_.experts(); ++e) {
            const auto begin = tokens_.begin() + choices_.first(e), end = tokens_.begin() + choices_.first(e + 1);
            if (std::find(begin, end, choices_.demand(e)) == end) std::fill(begin, end, 0.0);
        }
    }
    void serve(int e, double rest) {
        const auto [whole, time] = fastest(e, rest);
        if (!split_ || time <= target_) return put(whole, rest);
        const std::int32_t first = choices_.first(e), last = choices_.first(e + 1);
        rooms_.clear();
        for (std::int32_t o = first; o < last; ++o) {
            const int g = choices_.option(o).gpu;
            rooms_.push_back(price_.room(g, gpus_[g], tokens_[o], rest));
        }
        for (;;) {
            std::size_t roomiest = 0;
            double most = 0;
            for (std::size_t i = 0; i < rooms_.size(); ++i)
                roomiest = rooms_[i] > most ? i : roomiest, most = std::max(most, rooms_[i]);
            if (most == 0 || most >= rest) break;
            put(first + static_cast<std::int32_t>(roomiest), most);
            rest -= most, rooms_[roomiest] = 0;
        }
        put(fastest(e, rest).first, rest);
    }
    // The expert's option that so many more tokens make least slow, and its time.
    std::pair<std::int32_t, double> fastest(int e, double tokens) const {
        std::int32_t best = -1;
        double least = kInf;
        for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o) {
            const int g = choices_.option(o).gpu;
            const double time = price_.time_with(g, gpus_[g], tokens_[o], tokens);
            best = time < least ? o : best, least = std::min(least, time);
        }
        return {best, least};
    }

    // A chain from overfull GPU g that leaves less than `allowed` overflow on g and on the GPUs that it
    // gives to, more than these have now. False and undone if there is none.
    bool chain(int g, double allowed, int links, std::int64_t end) {
        const Gpu& from = gpus_[g];
        std::int32_t* const active = active_.data() + static_cast<std::size_t>(links - 1) * choices_.options();
        std::int32_t count = 0;
        for (const std::int32_t o : choices_.on(g)) active[count] = o, count += tokens_[o] > 0;
        for (const std::int32_t o : std::span(active, count)) {
            const double x = tokens_[o];
            const double whole = price_.over_without(g, from, x, x);
            if (whole >= allowed - gain_) continue;
            const double part = split_ ? price_.excess(g, from, x) : x;
            const double part_left = part < x ? price_.over_without(g, from, x, part) : kInf;
            const int e = choices_.option(o).expert;
            const std::int32_t first = choices_.first(e), last = choices_.first(e + 1);
            for (std::int32_t d = o + 1 == last ? first : o + 1; d != o; d = d + 1 == last ? first : d + 1) {
                if (++work_ >= end) return false;
                const int h = choices_.option(d).gpu;
                const Gpu& to = gpus_[h];
                const double had = tokens_[d], most = allowed + to.over - gain_;
                if (whole + price_.over_with(h, to, had, x) < most) return move(o, d, x);
                if (part_left + price_.over_with(h, to, had, part) < most) return move(o, d, part);
                if (links > 1)
                    for (const auto [amount, left] : {Link{x, whole}, Link{part, part_left}})
                        if (left < most && relay(o, d, amount, allowed + to.over - left, links - 1, end))
                            return true;
                if (!split_ || price_.over_with(h, to, had, 1) > 0) continue;
                const double fits = price_.room(h, to, had, x);
                if (fits == 0 || fits == x || fits == part) continue;
                if (price_.over_without(g, from, x, fits) + price_.over_with(h, to, had, fits) < allowed - gain_)
                    return move(o, d, fits);
            }
        }
        return false;
    }
    bool move(std::int32_t o, std::int32_t d, double amount) {
        give(o, -amount), give(d, amount);
        return true;
    }
    // Moves tokens and goes on with a chain from where they come to; undone if there is none.
    bool relay(std::int32_t o, std::int32_t d, double amount, double allowed, int links, std::int64_t end) {
        const int g = choices_.option(o).gpu, h = choices_.option(d).gpu;
        const Gpu from = gpus_[g], to = gpus_[h];
        const double x = tokens_[o], y = tokens_[d];
        move(o, d, amount);
        if (chain(h, allowed, links, end)) return true;
        tokens_[o] = x, tokens_[d] = y, gpus_[g] = from, gpus_[h] = to;
        return false;
    }

    const Choices& choices_;
    Price price_;
    bool split_ = true;
    double target_ = 0, gain_ = 0, makespan_ = 0;
    std::int64_t work_ = 0;
    std::vector<double> tokens_, kept_tokens_;
    std::vector<std::uint64_t> rest_;  // tokens left over and their expert, in one word to sort
    std::vector<double> rooms_;        // of an expert's options
    std::vector<Gpu> gpus_, kept_gpus_;
    std::vector<std::int32_t> active_;  // options of a chain's GPUs, by links that are left
    Xorshift random_;
};

}  // namespace eplb
