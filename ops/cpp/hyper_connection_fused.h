// The streams after one block and before the next, LANES tokens at a time: the new streams of these tokens, and backward the
// sum of what their gradient is made of, are in the cache from the one kernel of hyper_connection.h to the other.
#pragma once

#include "hyper_connection.h"

namespace hyper_connection {

// Sums of the projection that are in registers together: of so many rows of fn and TOKENS_TOGETHER tokens.
constexpr int ROWS_TOGETHER = 3;
// Channels that are projected at a time. Those of the block's tokens are copied: streams lie a power of two apart, where the
// first cache has room for few of them.
template <class T>
constexpr int CHUNK = 16 * LANES<T>;

// z = x fn^T of a block of `count` tokens.
template <class T, class S>
INLINE void project(const S* x, const T* fn, T* z, int count, int64_t all) {
    constexpr int L = LANES<T>, M = TOKENS_TOGETHER<T>;
    Lanes<T> sums[ROWS][L] = {};
    T v[L][CHUNK<T>] = {};
    for (int64_t first = 0; first < all; first += CHUNK<T>) {
        const int64_t some = std::min<int64_t>(CHUNK<T>, all - first);
        for (int t = 0; t < count; ++t)
            over_channels<T>(some, [&](int64_t d, auto width) CHANNELS {
                store<T>(v[t] + d, load<T>(x + t * all + first + d, width), width);
            });
        for (int row = 0; row < ROWS; row += ROWS_TOGETHER)
            for (int token = 0; token < L; token += M) {
                Lanes<T> sum[ROWS_TOGETHER][M];
                for (int r = 0; r < ROWS_TOGETHER; ++r)
                    for (int t = 0; t < M; ++t) sum[r][t] = sums[row + r][token + t];
                over_channels<T>(some, [&](int64_t d, auto width) CHANNELS {
                    Lanes<T> f[ROWS_TOGETHER];
                    for (int r = 0; r < ROWS_TOGETHER; ++r) f[r] = load<T>(fn + (row + r) * all + first + d, width);
                    for (int t = 0; t < M; ++t) {
                        const Lanes<T> w = load<T>(v[token + t] + d, width);
                        for (int r = 0; r < ROWS_TOGETHER; ++r) sum[r][t] += w * f[r];
                    }
                });
                for (int r = 0; r < ROWS_TOGETHER; ++r)
                    for (int t = 0; t < M; ++t) sums[row + r][token + t] = sum[r][t];
            }
    }
    for (int t = 0; t < count; ++t)
        for (int r = 0; r < ROWS; ++r) z[t * ROWS + r] = total<T>(sums[r][t]);
}

template <class T, class S>
void post_pre(const S* y, const S* x, const T* post_of, const T* comb_of, Parameters<T> p, T norm_eps, S* out, S* u,
              T* new_post, T* new_comb, T* z, T* rstd, int64_t tokens, int64_t width, int threads) {
    const int64_t all = N * width;
#pragma omp parallel for num_threads(threads) if (tokens > LANES<T>)
    for (int64_t first = 0; first < tokens; first += LANES<T>) {
        const int count = int(std::min<int64_t>(LANES<T>, tokens - first));
        S* to = out + first * all;
        post<T, S>(y + first * width, x + first * all, post_of + first * N, comb_of + first * N * N, to, count, width, 1);
        project<T, S>(to, p.fn, z + first * ROWS, count, all);
        pre<T, S>(to, p, norm_eps, z + first * ROWS, u + first * width, new_post + first * N, new_comb + first * N * N,
                  rstd + first, count, width, 1);
    }
}

// What the backward reads of hc_post, and what it writes.
template <class T, class S>
struct Post {
    const S *y, *x;
    const T *post, *comb;
    S *dy, *dx;
    T *dpost, *dcomb;
};

// Of the tokens from `begin` to `end`; `grad` is what reaches the new streams from elsewhere, or null.
template <class T, class S>
void post_pre_backward_range(const S* grad, const S* du, const T* dpost, const T* dcomb, Post<T, S> a, const S* x,
                             const Parameters<T>& p, const T* z, const T* rstd, Sums<T> sums, int64_t begin, int64_t end,
                             int64_t width) {
    const int64_t all = N * width;
    const std::unique_ptr<S[]> kept(new S[LANES<T> * all]);
    S* g = kept.get();
    for (int64_t t = begin; t < end; t += LANES<T>) {
        const int64_t count = std::min<int64_t>(LANES<T>, end - t);
        pre_backward_range<T, S>(du + t * width, dpost + t * N, dcomb + t * N * N, x + t * all, p, z + t * ROWS, rstd + t, g,
                                 sums, 0, count, width);
        if (grad)
            over_channels<T>(count * all, [&](int64_t d, auto some) CHANNELS {
                store<T>(g + d, load<T>(g + d, some) + load<T>(grad + t * all + d, some), some);
            });
        post_backward<T, S>(g, a.y + t * width, a.x + t * all, a.post + t * N, a.comb + t * N * N, a.dy + t * width,
                            a.dx + t * all, a.dpost + t * N, a.dcomb + t * N * N, count, width, 1);
    }
}

// Threads sum the gradients of the parameters over their own tokens; the sums are added in the order of the tokens.
template <class T, class S>
void post_pre_backward(const S* grad, const S* du, const T* dpost, const T* dcomb, Post<T, S> a, const S* x, Parameters<T> p,
                       const T* z, const T* rstd, Sums<T> sums, int64_t tokens, int64_t width, int threads) {
    const int64_t blocks = (tokens + LANES<T> - 1) / LANES<T>, size = ROWS * N * width, all = size + ROWS + 3;
    const int64_t parts = blocks > FEW ? std::min<int64_t>(threads, blocks) : 1;
    std::vector<T> parameters(parts * all);  // zeros
#pragma omp parallel for num_threads(threads) if (parts > 1) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) {
        T* own = parameters.data() + part * all;
        post_pre_backward_range<T, S>(grad, du, dpost, dcomb, a, x, p, z, rstd, {own, own + size, own + size + ROWS},
                                      blocks * part / parts * LANES<T>,
                                      std::min(tokens, blocks * (part + 1) / parts * LANES<T>), width);
    }
    for (int64_t part = 1; part < parts; ++part)
        for (int64_t i = 0; i < all; ++i) parameters[i] += parameters[part * all + i];
    std::copy_n(parameters.data(), size, sums.fn);
    std::copy_n(parameters.data() + size, ROWS, sums.base);
    std::copy_n(parameters.data() + size + ROWS, 3, sums.scale);
}

}  // namespace hyper_connection
