// Weights from GPU to GPU in rounds in which every GPU sends one at most and receives one at most.
//
// A move is an expert that a GPU receives, from any of those that hold it. Two steps, each exact:
// 1. Who sends. The fewest rounds that any choice of senders can do with is the larger of what some GPU
//    receives and of the least largest number that a GPU sends: a semi-matching. Of all choices with
//    so few, one with the fewest moves between nodes: every move starts at its nearest holder (same node
//    first, then the one that sends least so far, then the lowest), and GPUs that send more than the cap pass
//    moves on along cheapest paths (successive shortest paths; arcs cost 1 where a move leaves its receiver's
//    node and -1 where it comes back). If a GPU above the cap reaches none below it, the GPUs that it
//    reaches hold all that they send between them, and the cap rises to their mean.
// 2. When. Moves are edges of a bipartite multigraph of senders and receivers, rounds are colours, and as
//    many as the largest degree do (Koenig): a new edge takes a colour free at both ends, or the colours
//    of an alternating path are swapped. Moves between nodes come first, in the fewest rounds that hold
//    them; the others are added by swaps that bring none of these into a further round, where there are
//    such swaps among those tried.
// Then the rounds are put in order, so that old weights leave early: next comes the one whose receivers have
// the fewest weights waiting for a slot, then the one that frees most slots, then the lowest.
// Deterministic. Time O(M) for the first choice, O(G M) per path, O(R + G) per edge, O(R M) for the order, with M
// moves, G GPUs and R rounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace eplb {

class Transfer {
  public:
    // Moves of one batch, by the GPU that receives and the weight: one expert of one layer.
    struct Moves {
        std::span<const std::int32_t> receiver, weight;
        std::span<const std::int32_t> first;    // by weight, into:
        std::span<const std::int32_t> holders;  // GPUs, ascending
        std::span<const std::int32_t> leaves;   // by holder: 1 if its slot is to be filled anew
        std::int32_t gpus, gpus_per_node;

        std::int32_t size() const { return static_cast<std::int32_t>(receiver.size()); }
        std::int32_t begin(std::int32_t move) const { return first[weight[move]]; }
        std::int32_t end(std::int32_t move) const { return first[weight[move] + 1]; }
        bool between(std::int32_t move, std::int32_t sender) const {
            return sender / gpus_per_node != receiver[move] / gpus_per_node;
        }
    };

    // Writes the place of its sender in `holders`, and its round, for every move. Returns the rounds.
    std::int32_t plan(const Moves& moves, std::int32_t* holder, std::int32_t* round) {
        moves_ = moves, holder_ = holder, round_ = round;
        choose_senders();
        colour();
        order();
        return rounds_;
    }

  private:
    static constexpr std::int32_t kNone = -1;
    static constexpr int kMostTries = 64;  // of pairs of colours, where none keeps to its kind

    std::int32_t sender(std::int32_t move) const { return moves_.holders[holder_[move]]; }

    // --- who sends ---

    void choose_senders() {
        std::vector<std::int32_t> received(moves_.gpus, 0);
        for (const std::int32_t g : moves_.receiver) ++received[g];
        std::int64_t cap = *std::max_element(received.begin(), received.end());
        free_.clear();
        for (std::int32_t m = 0; m < moves_.size(); ++m)
            if (moves_.end(m) - moves_.begin(m) > 1) free_.push_back(m);
        do {
            start_near();
        } while (!lower_to(cap));
        rounds_ = static_cast<std::int32_t>(cap);
    }

    void start_near() {
        sent_.assign(moves_.gpus, 0);
        for (std::int32_t m = 0; m < moves_.size(); ++m) {
            std::int32_t best = moves_.begin(m);
            for (std::int32_t h = best + 1; h < moves_.end(m); ++h)
                if (rank(m, h) < rank(m, best)) best = h;
            holder_[m] = best;
            ++sent_[moves_.holders[best]];
        }
    }
    std::int64_t rank(std::int32_t move, std::int32_t holder) const {
        const std::int32_t gpu = moves_.holders[holder];
        return (std::int64_t{moves_.between(move, gpu)} << 32) + sent_[gpu];
    }

    // Brings what every GPU sends down to `cap`, or says false and raises `cap` to what is needed at least.
    bool lower_to(std::int64_t& cap) {
        for (;;) {
            distances(cap);
            std::int32_t end = kNone;
            bool over = false;
            for (std::int32_t g = 0; g < moves_.gpus; ++g) {
                over = over || sent_[g] > cap;
                if (sent_[g] < cap && distance_[g] < kFar && (end == kNone || distance_[g] < distance_[end]))
                    end = g;
            }
            if (!over) return true;
            if (end == kNone) break;
            ++sent_[end];
            for (; via_[end] != kNone; end = from_[end]) holder_[via_[end]] = to_[end];
            --sent_[end];
        }
        std::int64_t all = 0, reached = 0;
        for (std::int32_t g = 0; g < moves_.gpus; ++g)
            if (distance_[g] < kFar) all += sent_[g], ++reached;
        cap = (all + reached - 1) / reached;
        return false;
    }

    // Cheapest paths from the GPUs above the cap along moves that could have another sender, by rounds of
    // relaxation: arcs may cost less than nothing, cycles never do.
    void distances(std::int64_t cap) {
        distance_.assign(moves_.gpus, kFar);
        via_.assign(moves_.gpus, kNone), from_.resize(moves_.gpus), to_.resize(moves_.gpus);
        for (std::int32_t g = 0; g < moves_.gpus; ++g)
            if (sent_[g] > cap) distance_[g] = 0;
        for (bool changed = true; changed;) {
            changed = false;
            for (const std::int32_t m : free_) {
                const std::int32_t g = sender(m);
                if (distance_[g] == kFar) continue;
                const std::int32_t here = distance_[g] - moves_.between(m, g);
                for (std::int32_t h = moves_.begin(m); h < moves_.end(m); ++h) {
                    const std::int32_t other = moves_.holders[h];
                    if (other == g || here + moves_.between(m, other) >= distance_[other]) continue;
                    distance_[other] = here + moves_.between(m, other);
                    via_[other] = m, from_[other] = g, to_[other] = h;
                    changed = true;
                }
            }
        }
    }

    // --- when ---

    // Ends of edges are numbered: senders, then receivers.
    std::int32_t& at(std::int32_t end, std::int32_t colour) {
        return edge_[static_cast<std::size_t>(end) * rounds_ + colour];
    }
    std::int32_t receiving(std::int32_t move) const { return moves_.gpus + moves_.receiver[move]; }

    void colour() {
        edge_.assign(static_cast<std::size_t>(2) * moves_.gpus * rounds_, kNone);
        std::vector<std::int32_t> between, within, degree(2 * moves_.gpus, 0);
        for (std::int32_t m = 0; m < moves_.size(); ++m)
            (moves_.between(m, sender(m)) ? between : within).push_back(m);
        std::int32_t slow = 0;
        for (const std::int32_t m : between) slow = std::max({slow, ++degree[sender(m)], ++degree[receiving(m)]});
        slow_.assign(rounds_, 0);
        std::fill_n(slow_.begin(), slow, 1);
        for (const std::int32_t m : between) {
            const std::int32_t a = free_at(sender(m), 1), b = free_at(receiving(m), 1);
            swap_path(m, a, b);
            put(m, a);
        }
        for (const std::int32_t m : within) add_within(m);
        for (std::int32_t g = 0; g < moves_.gpus; ++g)
            for (std::int32_t c = 0; c < rounds_; ++c)
                if (at(g, c) != kNone) round_[at(g, c)] = c;
    }

    std::int32_t free_at(std::int32_t end, char slow) {
        for (std::int32_t c = 0; c < rounds_; ++c)
            if (slow_[c] == slow && at(end, c) == kNone) return c;
        return kNone;
    }

    void add_within(std::int32_t move) {
        const std::int32_t u = sender(move), v = receiving(move);
        for (std::int32_t c = 0; c < rounds_; ++c)
            if (at(u, c) == kNone && at(v, c) == kNone) return put(move, c);
        for (const char kind : {0, 1}) {
            const std::int32_t a = free_at(u, kind), b = free_at(v, kind);
            if (a == kNone || b == kNone) continue;
            swap_path(move, a, b);
            return put(move, a);
        }
        // One end is free in rounds with moves between nodes only, the other in those without.
        std::int32_t best_a = kNone, best_b = kNone, fewest = std::numeric_limits<std::int32_t>::max(), tries = 0;
        for (std::int32_t a = 0; a < rounds_ && fewest > 0; ++a) {
            if (at(u, a) != kNone) continue;
            for (std::int32_t b = 0; b < rounds_ && fewest > 0 && tries < kMostTries; ++b) {
                if (at(v, b) != kNone) continue;
                ++tries;
                const std::int32_t lost = between_on_path(v, a, b);
                if (lost < fewest) best_a = a, best_b = b, fewest = lost;
            }
        }
        if (fewest > 0) slow_[best_a] = slow_[best_b] = 1;
        swap_path(move, best_a, best_b);
        put(move, best_a);
    }

    void put(std::int32_t move, std::int32_t colour) {
        at(sender(move), colour) = at(receiving(move), colour) = move;
    }

    // Makes colour a, free where `move` is sent, free where it is received, where b is: the path of edges
    // coloured a, b, a, ... from there swaps them. It cannot come to the sender, which a would lead to.
    void swap_path(std::int32_t move, std::int32_t a, std::int32_t b) {
        path_.clear();
        walk(receiving(move), a, b, [&](std::int32_t edge) { path_.push_back(edge); });
        for (std::size_t i = 0; i < path_.size(); ++i) {
            const std::int32_t old = i % 2 ? b : a;
            for (const std::int32_t end : {sender(path_[i]), receiving(path_[i])})
                if (at(end, old) == path_[i]) at(end, old) = kNone;
        }
        for (std::size_t i = 0; i < path_.size(); ++i) put(path_[i], i % 2 ? a : b);
    }

    // Moves between nodes that a swap would bring into a round that has none.
    std::int32_t between_on_path(std::int32_t end, std::int32_t a, std::int32_t b) {
        std::int32_t lost = 0, length = 0;
        walk(end, a, b, [&](std::int32_t edge) {
            const std::int32_t to = length++ % 2 ? a : b;
            lost += !slow_[to] && moves_.between(edge, sender(edge));
        });
        return lost;
    }

    template <class Visit>
    void walk(std::int32_t end, std::int32_t a, std::int32_t b, Visit&& visit) {
        for (std::int32_t c = a; a != b && at(end, c) != kNone; c = c == a ? b : a) {
            const std::int32_t edge = at(end, c);
            visit(edge);
            end = sender(edge) == end ? receiving(edge) : sender(edge);
        }
    }

    // --- in which order ---

    void order() {
        std::vector<std::vector<std::int32_t>> of_round(rounds_);
        std::vector<std::int32_t> left(moves_.holders.size(), 0), held(moves_.gpus, 0), place(rounds_, kNone);
        for (std::int32_t m = 0; m < moves_.size(); ++m) {
            of_round[round_[m]].push_back(m);
            ++left[holder_[m]];
        }
        for (std::int32_t next = 0; next < rounds_; ++next) {
            std::int32_t best = kNone, best_peak = 0, best_freed = 0;
            for (std::int32_t r = 0; r < rounds_; ++r) {
                if (place[r] != kNone) continue;
                std::int32_t freed = 0, peak = std::numeric_limits<std::int32_t>::min();
                for (const std::int32_t m : of_round[r]) {
                    peak = std::max(peak, held[moves_.receiver[m]] + 1);
                    freed += moves_.leaves[holder_[m]] && left[holder_[m]] == 1;
                }
                if (best != kNone && (peak > best_peak || (peak == best_peak && freed <= best_freed))) continue;
                best = r, best_peak = peak, best_freed = freed;
            }
            place[best] = next;
            for (const std::int32_t m : of_round[best]) {
                ++held[moves_.receiver[m]];
                if (--left[holder_[m]] == 0 && moves_.leaves[holder_[m]]) --held[sender(m)];
            }
        }
        for (std::int32_t m = 0; m < moves_.size(); ++m) round_[m] = place[round_[m]];
    }

    static constexpr std::int32_t kFar = std::numeric_limits<std::int32_t>::max();

    Moves moves_{};
    std::int32_t *holder_ = nullptr, *round_ = nullptr;
    std::int32_t rounds_ = 0;
    std::vector<std::int32_t> free_;  // moves that several GPUs could send
    std::vector<std::int64_t> sent_;
    std::vector<std::int32_t> distance_, via_, from_, to_;  // by GPU: the path to it, from its end
    std::vector<std::int32_t> edge_;                        // by end and colour
    std::vector<std::int32_t> path_;
    std::vector<char> slow_;  // by colour: whether moves between nodes may have it
};

}  // namespace eplb
