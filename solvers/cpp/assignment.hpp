// The assignment problem: which row gets which column at the least total cost.
//
// Shortest augmenting paths with potentials (Kuhn 1955, Munkres 1957; in the form of Jonker and
// Volgenant 1987), rows in order; the lowest column on a tie.
// Time O(n^3).
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace eplb {

// `cost` is [n, n]. Returns the column of each row.
inline std::vector<std::int32_t> assign_rows(std::span<const std::int64_t> cost, std::int32_t n) {
    constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();
    // Columns n stands for the row that is being placed.
    std::vector<std::int64_t> row_price(n, 0), column_price(n + 1, 0), distance(n);
    std::vector<std::int32_t> row_of(n + 1, -1), from(n);
    std::vector<char> done(n + 1);
    for (std::int32_t row = 0; row < n; ++row) {
        distance.assign(n, kFar);
        done.assign(n + 1, 0);
        std::int32_t column = n;
        row_of[n] = row;
        do {
            done[column] = 1;
            const std::int32_t r = row_of[column];
            std::int64_t step = kFar;
            std::int32_t next = -1;
            for (std::int32_t c = 0; c < n; ++c) {
                if (done[c]) continue;
                const std::int64_t reduced =
                    cost[static_cast<std::size_t>(r) * n + c] - row_price[r] - column_price[c];
                if (reduced < distance[c]) distance[c] = reduced, from[c] = column;
                if (distance[c] < step) step = distance[c], next = c;
            }
            for (std::int32_t c = 0; c <= n; ++c) {
                if (done[c])
                    row_price[row_of[c]] += step, column_price[c] -= step;
                else if (c < n)
                    distance[c] -= step;
            }
            column = next;
        } while (row_of[column] >= 0);
        for (; column != n; column = from[column]) row_of[column] = row_of[from[column]];
    }
    std::vector<std::int32_t> column_of(n);
    for (std::int32_t c = 0; c < n; ++c) column_of[row_of[c]] = c;
    return column_of;
}

}  // namespace eplb
