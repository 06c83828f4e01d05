// What stands between the matrix products of attention: masks, exponentials and their gradients, one pass over the logits.
#pragma once

#include <limits>
#include <vector>

#include "lanes.h"

namespace attention {

template <class T>
using Mask = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// A block of queries: `first` is the index of its first one, `low` that of its first window key. A row of logits holds
// `n_window` window keys, then `n_entries` entries: all of the row's first ones, or (`gathered`) the query's own `chosen`.
struct Block {
    const int64_t *start, *entry_end, *ids;
    int64_t batch, queries, heads, n_window, n_entries, all_entries, chosen, first, low, window;
    bool gathered;

    int64_t columns() const { return n_window + n_entries; }
};

// All ones where query t of row b sees the key of a column.
template <class T>
inline void visible(const Block& at, int64_t b, int64_t i, Mask<T>* keep) {
    const int64_t t = at.first + i, begin = at.start[b * at.queries + i];
    const int64_t *ends = at.entry_end + b * at.all_entries, *ids = at.ids + (b * at.queries + i) * at.chosen;
    const int64_t oldest = std::max(begin, t - at.window + 1);
    for (int64_t j = 0; j < at.n_window; ++j) keep[j] = -Mask<T>(at.low + j <= t && at.low + j >= oldest);
    Mask<T>* entries = keep + at.n_window;
    if (at.gathered) {
        for (int64_t j = 0; j < at.n_entries; ++j)
            entries[j] = -Mask<T>(ids[j] >= 0 && ends[ids[j]] <= t && ends[ids[j]] >= begin);
    } else if (at.ids == nullptr) {
        for (int64_t j = 0; j < at.n_entries; ++j) entries[j] = -Mask<T>(ends[j] <= t && ends[j] >= begin);
    } else {
        std::fill(entries, entries + at.n_entries, 0);
        for (int64_t j = 0; j < at.chosen; ++j) {
            const int64_t p = ids[j];
            if (p >= 0 && p < at.n_entries) entries[p] = -Mask<T>(ends[p] <= t && ends[p] >= begin);
        }
    }
}

// body(d, count) for d = 0, LANES, ... of a row of logits: count is a constant but for the last columns.
template <class T, class Body>
INLINE void along(int64_t n, Body body) {
    int64_t d = 0;
    for (; d + LANES<T> <= n; d += LANES<T>) body(d, std::integral_constant<int, LANES<T>>{});
    if (d < n) body(d, int(n - d));
}

// body(row of logits, keep) for each head of each query.
template <class T, class Body>
void over_rows(const Block& at, int threads, Body body) {
#pragma omp parallel num_threads(threads) if (at.batch * at.queries > 1)
    {
        std::vector<Mask<T>> keep(at.columns() + LANES<T>);
#pragma omp for
        for (int64_t row = 0; row < at.batch * at.queries; ++row) {
            visible<T>(at, row / at.queries, row % at.queries, keep.data());
            for (int64_t h = 0; h < at.heads; ++h) body(row * at.heads + h, h, keep.data());
        }
    }
}

// z becomes e^(z - peak), zero where nothing is seen; `total` is its sum and the sink's.
template <class T>
void weights(T* z, const T* sink, T* peak, T* total, const Block& at, int threads) {
    const int64_t n = at.columns();
    over_rows<T>(at, threads, [=](int64_t row, int64_t h, const Mask<T>* keep) {
        T* x = z + row * n;
        constexpr T nothing = -std::numeric_limits<T>::infinity();
        Lanes<T> best = Lanes<T>{} + nothing, sum = {};
        along<T>(n, [&](int64_t d, auto count) {
            const Lanes<T> v = load<Mask<T>>(keep + d, count) ? load<T>(x + d, count) : Lanes<T>{} + nothing;
            best = (v > best) ? v : best;
        });
        T most = sink[h];
        for (int i = 0; i < LANES<T>; ++i) most = std::max(most, best[i]);
        along<T>(n, [&](int64_t d, auto count) {
            const Lanes<T> w = exponential<T>(load<Mask<T>>(keep + d, count) ? load<T>(x + d, count) - most : Lanes<T>{} + nothing);
            sum += w;
            store<T>(x + d, w, count);
        });
        peak[row] = most;
        total[row] = ::total<T>(sum) + std::exp(sink[h] - most);
    });
}

// z becomes w = e^(z - lse), and dw becomes dz = w (dw - delta); both zero where nothing is seen.
template <class T>
void weights_backward(T* z, T* dw, const T* lse, const T* delta, const Block& at, int threads) {
    const int64_t n = at.columns();
    over_rows<T>(at, threads, [=](int64_t row, int64_t, const Mask<T>* keep) {
        T *x = z + row * n, *g = dw + row * n;
        along<T>(n, [&](int64_t d, auto count) {
            const Lanes<Mask<T>> seen = load<Mask<T>>(keep + d, count);
            const Lanes<T> w = exponential<T>(seen ? load<T>(x + d, count) - lse[row] : Lanes<T>{} - std::numeric_limits<T>::infinity());
            store<T>(x + d, w, count);
            store<T>(g + d, seen ? w * (load<T>(g + d, count) - delta[row]) : Lanes<T>{}, count);
        });
    });
}

}  // namespace attention
