// What the compiled routers are timed against, on the same arrays and with the same flags: METRO's
// greedy as a bare loop, and METRO's own exact method, a binary search on the makespan with Dinic's
// max-flow inside (arXiv 2512.09277). Built and called by routing_speed.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "placement.hpp"

using eplb::Candidate;
using eplb::Layer;
using eplb::Placement;

namespace {

// Algorithm 1 with nothing around it: no checks, no certificate, no bound.
void bare_greedy(const Layer& layer, const std::int64_t* tokens, std::int64_t* routed, std::int32_t* activated) {
    std::memset(activated, 0, layer.gpus * sizeof *activated);
    std::memset(routed, 0, layer.physical_slots() * sizeof *routed);
    for (std::int32_t e = 0; e < layer.experts; ++e) {
        if (tokens[e] == 0) continue;
        std::int32_t best = layer.first[e];
        for (std::int32_t i = best + 1; i < layer.first[e + 1]; ++i)
            if (activated[layer.candidates[i].gpu] < activated[layer.candidates[best].gpu]) best = i;
        ++activated[layer.candidates[best].gpu];
        routed[layer.candidates[best].slot] = tokens[e];
    }
}

// Source -> live experts (capacity 1) -> their GPUs (1) -> sink (the makespan that is tried).
class Dinic {
  public:
    std::int64_t solve(const Layer& layer, const std::int64_t* tokens, std::int64_t* routed) {
        build(layer, tokens);
        std::int32_t low = static_cast<std::int32_t>((live_.size() + layer.gpus - 1) / layer.gpus);
        std::int32_t high = static_cast<std::int32_t>(live_.size());
        while (low < high) {
            const std::int32_t middle = (low + high) / 2;
            if (saturates(layer, middle))
                high = middle;
            else
                low = middle + 1;
        }
        saturates(layer, low);
        std::memset(routed, 0, layer.physical_slots() * sizeof *routed);
        for (std::size_t i = 0; i < live_.size(); ++i)
            for (std::int32_t a = head_[1 + i]; a >= 0; a = arcs_[a].next)
                if (arcs_[a].slot >= 0 && arcs_[a].capacity == 0) routed[arcs_[a].slot] = tokens[live_[i]];
        return low;
    }

  private:
    struct Arc {
        std::int32_t to, next, capacity, full, slot;
    };

    void build(const Layer& layer, const std::int64_t* tokens) {
        live_.clear();
        arcs_.clear();
        for (std::int32_t e = 0; e < layer.experts; ++e)
            if (tokens[e] != 0) live_.push_back(e);
        const auto live = static_cast<std::int32_t>(live_.size());
        gpu0_ = 1 + live;
        sink_ = gpu0_ + layer.gpus;
        head_.assign(sink_ + 1, -1);
        for (std::int32_t i = 0; i < live; ++i) {
            add(0, 1 + i, 1, -1);
            for (const Candidate c : layer.candidates_of(live_[i])) add(1 + i, gpu0_ + c.gpu, 1, c.slot);
        }
        to_sink_ = static_cast<std::int32_t>(arcs_.size());
        for (std::int32_t g = 0; g < layer.gpus; ++g) add(gpu0_ + g, sink_, 0, -1);
    }

    void add(std::int32_t from, std::int32_t to, std::int32_t capacity, std::int32_t slot) {
        arcs_.push_back({to, head_[from], capacity, capacity, slot});
        head_[from] = static_cast<std::int32_t>(arcs_.size()) - 1;
        arcs_.push_back({from, head_[to], 0, 0, -1});
        head_[to] = static_cast<std::int32_t>(arcs_.size()) - 1;
    }

    bool saturates(const Layer& layer, std::int32_t makespan) {
        for (Arc& arc : arcs_) arc.capacity = arc.full;
        for (std::int32_t g = 0; g < layer.gpus; ++g) arcs_[to_sink_ + 2 * g].capacity = makespan;
        std::int32_t flow = 0;
        while (levels()) {
            at_ = head_;
            while (const std::int32_t pushed = push(0, std::numeric_limits<std::int32_t>::max())) flow += pushed;
        }
        return flow == static_cast<std::int32_t>(live_.size());
    }

    bool levels() {
        level_.assign(head_.size(), -1);
        queue_.assign(1, 0);
        level_[0] = 0;
        for (std::size_t i = 0; i < queue_.size() && level_[sink_] < 0; ++i)
            for (std::int32_t a = head_[queue_[i]]; a >= 0; a = arcs_[a].next)
                if (arcs_[a].capacity > 0 && level_[arcs_[a].to] < 0) {
                    level_[arcs_[a].to] = level_[queue_[i]] + 1;
                    queue_.push_back(arcs_[a].to);
                }
        return level_[sink_] >= 0;
    }

    std::int32_t push(std::int32_t node, std::int32_t limit) {
        if (node == sink_) return limit;
        for (std::int32_t& a = at_[node]; a >= 0; a = arcs_[a].next) {
            if (arcs_[a].capacity == 0 || level_[arcs_[a].to] != level_[node] + 1) continue;
            if (const std::int32_t pushed = push(arcs_[a].to, std::min(limit, arcs_[a].capacity))) {
                arcs_[a].capacity -= pushed;
                arcs_[a ^ 1].capacity += pushed;
                return pushed;
            }
        }
        return 0;
    }

    std::vector<std::int32_t> live_, head_, at_, level_, queue_;
    std::vector<Arc> arcs_;
    std::int32_t gpu0_ = 0, sink_ = 0, to_sink_ = 0;
};

}  // namespace

extern "C" {

void* make_placement(const std::int32_t* slots, std::int64_t layers, std::int64_t gpus, std::int64_t per_gpu,
                     std::int64_t experts) {
    return new Placement(std::span(slots, layers * gpus * per_gpu), layers, gpus, per_gpu, experts);
}

void free_placement(void* placement) { delete static_cast<Placement*>(placement); }

// `makespan` [problems], `routed` [problems, slots]; problem i is of layer i mod layers.
void run_bare_greedy(const void* handle, const std::int64_t* tokens, std::int64_t problems, std::int64_t* routed,
                     std::int64_t* makespan) {
    const auto& placement = *static_cast<const Placement*>(handle);
    std::vector<std::int32_t> activated(placement.layer(0).gpus);
    for (std::int64_t i = 0; i < problems; ++i) {
        const Layer& layer = placement.layer(i % placement.num_layers());
        bare_greedy(layer, tokens + i * layer.experts, routed + i * layer.physical_slots(), activated.data());
        makespan[i] = *std::max_element(activated.begin(), activated.end());
    }
}

void run_dinic(const void* handle, const std::int64_t* tokens, std::int64_t problems, std::int64_t* routed,
               std::int64_t* makespan) {
    const auto& placement = *static_cast<const Placement*>(handle);
    Dinic dinic;
    for (std::int64_t i = 0; i < problems; ++i) {
        const Layer& layer = placement.layer(i % placement.num_layers());
        makespan[i] = dinic.solve(layer, tokens + i * layer.experts, routed + i * layer.physical_slots());
    }
}
}
