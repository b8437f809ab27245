// vLLM-Ascend's default placement (policy_default_eplb.py: original_compute_balanced_pack_redundancy).
//
// The experts stand in a list by falling load per copy, at first by rising id. Sorting it anew is stable
// from the far end: equal loads change their order each time.
// 1. Every redundant slot: sort; one more copy to the first expert in the list that has fewer copies than
//    there are GPUs; its load per copy shrinks.
// 2. The extra copies by rising id, one to a GPU in turn.
// 3. Sort; the first copies in list order to the lightest GPU with room that does not hold the expert,
//    the lowest on a tie; where every GPU with room holds it, to the first of them.
// 4. GPU by GPU, twice-held experts by rising id: the first of the two slots goes to another expert, not
//    on the GPU and with fewer copies than GPUs, whose load per copy, with one copy more, is nearest; ties
//    to list order, which becomes the order of that nearness.
// The peak it reports keeps the loads per copy as they were when each replica was placed.
// GPUs may have unequal room (empty slots of an old placement): one without room takes no part.
// Time O(R E log E + E G S), and O(E log E + E S) per repair.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace eplb {

class AscendDefault {
  public:
    // `room` holds the slots that each GPU may fill; all together there are at least E. `slots` is
    // [gpus, slots_per_gpu]; those without room get -1. Returns the peak that the policy believes in.
    double place(std::span<const double> load, std::span<const std::int32_t> room, std::int32_t slots_per_gpu,
                 std::int32_t* slots) {
        experts_ = static_cast<std::int32_t>(load.size());
        gpus_.assign(room.size(), {});
        room_ = room;
        most_ = 0;
        std::int32_t redundant = -experts_;
        for (const std::int32_t r : room) most_ += r > 0, redundant += r;
        list_.clear();
        for (std::int32_t e = 0; e < experts_; ++e) list_.push_back({load[e], e});
        copies_.assign(experts_, 1);

        for (; redundant > 0 && grant(); --redundant) {
        }
        deal_extra_copies();
        sort_list();
        for (const Entry& entry : list_) put(gpu_for(entry.expert), entry);
        for (Gpu& gpu : gpus_) replace_twice_held(gpu);

        double peak = 0;
        std::fill_n(slots, static_cast<std::int64_t>(room.size()) * slots_per_gpu, -1);
        for (const Gpu& gpu : gpus_) {
            double sum = 0;
            for (std::size_t s = 0; s < gpu.size(); ++s) slots[s] = gpu[s].expert, sum += gpu[s].per_copy;
            peak = std::max(peak, sum);
            slots += slots_per_gpu;
        }
        return peak;
    }

  private:
    struct Entry {
        double per_copy;
        std::int32_t expert;
    };
    using Gpu = std::vector<Entry>;

    void sort_list() {
        std::reverse(list_.begin(), list_.end());
        std::stable_sort(list_.begin(), list_.end(),
                         [](const Entry& a, const Entry& b) { return a.per_copy > b.per_copy; });
    }

    bool grant() {
        sort_list();
        const auto taker =
            std::find_if(list_.begin(), list_.end(), [&](const Entry& e) { return copies_[e.expert] < most_; });
        if (taker == list_.end()) return false;
        add_copy(*taker);
        return true;
    }

    void add_copy(Entry& entry) {
        const std::int32_t copies = ++copies_[entry.expert];
        entry.per_copy = entry.per_copy * (copies - 1) / copies;
    }

    bool has_room(std::size_t gpu) const { return static_cast<std::int32_t>(gpus_[gpu].size()) < room_[gpu]; }

    static bool holds(const Gpu& gpu, std::int32_t expert) {
        return std::any_of(gpu.begin(), gpu.end(), [&](const Entry& e) { return e.expert == expert; });
    }

    static double sum(const Gpu& gpu) {
        double total = 0;
        for (const Entry& e : gpu) total += e.per_copy;
        return total;
    }

    void put(std::size_t gpu, const Entry& entry) { gpus_[gpu].push_back(entry); }

    void deal_extra_copies() {
        std::vector<double> per_copy(experts_);
        for (const Entry& e : list_) per_copy[e.expert] = e.per_copy;
        std::size_t gpu = 0;
        for (std::int32_t e = 0; e < experts_; ++e)
            for (std::int32_t copy = 1; copy < copies_[e]; ++copy) {
                while (!has_room(gpu)) gpu = (gpu + 1) % gpus_.size();
                put(gpu, {per_copy[e], e});
                gpu = (gpu + 1) % gpus_.size();
            }
    }

    std::size_t gpu_for(std::int32_t expert) const {
        std::size_t best = gpus_.size(), first = gpus_.size();
        double least = 0;
        for (std::size_t g = 0; g < gpus_.size(); ++g) {
            if (!has_room(g)) continue;
            if (first == gpus_.size()) first = g;
            if (holds(gpus_[g], expert)) continue;
            const double load = sum(gpus_[g]);
            if (best == gpus_.size() || load < least) best = g, least = load;
        }
        return best < gpus_.size() ? best : first;
    }

    void replace_twice_held(Gpu& gpu) {
        std::vector<std::int32_t> held;
        for (const Entry& e : gpu) held.push_back(e.expert);
        std::sort(held.begin(), held.end());
        for (std::size_t i = 1; i < held.size(); ++i)
            if (held[i] == held[i - 1]) replace(gpu, held[i]);
    }

    void replace(Gpu& gpu, std::int32_t expert) {
        Entry& slot = *std::find_if(gpu.begin(), gpu.end(), [&](const Entry& e) { return e.expert == expert; });
        const double lost = slot.per_copy;
        const auto distance = [&](const Entry& e) {
            const std::int32_t copies = copies_[e.expert];
            return std::abs(e.per_copy * copies / (copies + 1) - lost);
        };
        std::stable_sort(list_.begin(), list_.end(),
                         [&](const Entry& a, const Entry& b) { return distance(a) < distance(b); });
        const auto other = std::find_if(list_.begin(), list_.end(), [&](const Entry& e) {
            return copies_[e.expert] < most_ && !holds(gpu, e.expert);
        });
        if (other == list_.end()) return;  // the original has no answer here
        add_copy(*other);
        slot = *other;
        const std::int32_t left = --copies_[expert];
        for (Entry& e : list_)
            if (e.expert == expert) e.per_copy = lost * (left + 1) / left;
    }

    std::int32_t experts_ = 0, most_ = 0;
    std::span<const std::int32_t> room_;
    std::vector<Entry> list_;
    std::vector<std::int32_t> copies_;
    std::vector<Gpu> gpus_;
};

}  // namespace eplb
