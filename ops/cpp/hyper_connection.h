// The four residual streams of a token before and after a block: T is what is computed in, S how streams are stored.
//
// Work goes by blocks of LANES tokens. Their streams stay in the cache between the passes that need all of a token (norm and
// projection, gradient of pre) and the one that follows; the gates and normalisations of a block are one token to a lane.
#pragma once

#include <vector>

#include "lanes.h"
#include "sinkhorn.h"

#define CHANNELS __attribute__((always_inline))  // body of a loop over channels

namespace hyper_connection {

constexpr int N = 4, ROWS = (2 + N) * N;  // streams; rows of fn: N of pre, N of post, N N of comb

// Sums that are in registers together: of so many tokens of a block, or rows of fn, in two vectors of channels each.
constexpr int TOGETHER = REGISTER == 64 ? 8 : 4;
template <class T>
constexpr int TOKENS_TOGETHER = std::min(TOGETHER, LANES<T>);

constexpr int64_t FEW = 32;  // blocks, below which one thread is as quick

// Of a row: 0 for pre, 1 for post, 2 for comb.
INLINE int kind(int row) { return row < N ? 0 : row < 2 * N ? 1 : 2; }

template <class T>
struct Parameters {
    const T *fn, *base, *scale;
    int iters;
    T eps;

    INLINE T scale_of(int row) const { return scale[kind(row)]; }
};

// Sum of the squares of a token's streams.
template <class T, class S>
INLINE T square(const S* x, int64_t width) {
    Lanes<T> sum[N] = {};
    over_channels<T>(width, [&](int64_t d, auto count) CHANNELS {
        for (int j = 0; j < N; ++j) {
            const Lanes<T> v = load<T>(x + j * width + d, count);
            sum[j] += v * v;
        }
    });
    return total<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// z comes as the projection of the streams and leaves with the norm in it.
template <class T, class S>
void pre(const S* x, Parameters<T> p, T norm_eps, T* z, S* u, T* post, T* comb, T* rstd, int64_t tokens, int64_t width,
         int threads) {
    const int64_t all = N * width;
#pragma omp parallel for num_threads(threads) if (tokens > FEW * LANES<T>)
    for (int64_t first = 0; first < tokens; first += LANES<T>) {
        const int count = int(std::min<int64_t>(LANES<T>, tokens - first));
        const S* streams = x + first * all;
        T* logits = z + first * ROWS;
        for (int t = 0; t < count; ++t) {
            const T norm = 1 / std::sqrt(square<T>(streams + t * all, width) / T(all) + norm_eps);
            rstd[first + t] = norm;
            for (int r = 0; r < ROWS; ++r) logits[t * ROWS + r] *= norm;
        }
        Lanes<T> a[ROWS];
        sinkhorn::to_lanes<T>(logits, ROWS, count, a);
        for (int r = 0; r < ROWS; ++r) a[r] = a[r] * p.scale_of(r) + p.base[r];
        for (int r = 0; r < N; ++r) a[r] = sigmoid<T>(a[r]) + p.eps;
        for (int r = N; r < 2 * N; ++r) a[r] = 2 * sigmoid<T>(a[r]);
        sinkhorn::forward<T>(a + 2 * N, p.iters, p.eps);
        sinkhorn::from_lanes<T>(a + N, N, count, post + first * N);
        sinkhorn::from_lanes<T>(a + 2 * N, N * N, count, comb + first * N * N);
        for (int t = 0; t < count; ++t) {
            const S* v = streams + t * all;
            over_channels<T>(width, [&](int64_t d, auto some) CHANNELS {
                Lanes<T> sum = a[0][t] * load<T>(v + d, some);
                for (int j = 1; j < N; ++j) sum += a[j][t] * load<T>(v + j * width + d, some);
                store<T>(u + (first + t) * width + d, sum, some);
            });
        }
    }
}

// What the last pass of the backward needs of a block.
template <class T>
struct Factors {
    T pre[LANES<T>][N], dp[LANES<T>][ROWS], shrink[LANES<T>];
};

// dX = pre du + dp fn + shrink X of TOKENS tokens in VECTORS vectors of channels of stream j, f holding fn there.
template <class T, class S, int TOKENS, int VECTORS>
INLINE void stream_gradients(const Factors<T>& by, int t0, int j, const Lanes<T> (*f)[VECTORS], const Lanes<T> (*v)[VECTORS],
                             const S* du, S* dx, int64_t width, int count, bool past) {
    Lanes<T> sum[TOKENS][VECTORS];
    for (int t = 0; t < TOKENS; ++t)
        for (int i = 0; i < VECTORS; ++i)
            sum[t][i] = by.pre[t0 + t][j] * load<T>(du + (t0 + t) * width + i * LANES<T>, count) +
                        by.shrink[t0 + t] * v[t0 + t][i];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t)
            for (int i = 0; i < VECTORS; ++i) sum[t][i] += by.dp[t0 + t][r] * f[r][i];
    for (int t = 0; t < TOKENS; ++t)
        for (int i = 0; i < VECTORS; ++i) store<T>(dx + (t0 + t) * N * width + i * LANES<T>, sum[t][i], count, past);
}

// dX and a part of dfn, of a block of tokens in VECTORS vectors of `count` channels of stream j, the first of which is d.
template <class T, class S, int VECTORS>
INLINE void finish_channels(const S* x, const S* du, const T* fn, const Factors<T>& by, S* dx, T* dfn, int tokens,
                            int64_t width, int j, int64_t d, int count, bool past) {
    constexpr int L = LANES<T>;
    const int64_t all = N * width, at = j * width + d;
    Lanes<T> f[ROWS][VECTORS], v[L][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < VECTORS; ++i) f[r][i] = load<T>(fn + r * all + at + i * L, count);
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < VECTORS; ++i) v[t][i] = load<T>(x + t * all + at + i * L, count);
    int t = 0;
    for (; t + TOKENS_TOGETHER<T> <= tokens; t += TOKENS_TOGETHER<T>)
        stream_gradients<T, S, TOKENS_TOGETHER<T>, VECTORS>(by, t, j, f, v, du + d, dx + at, width, count, past);
    for (; t < tokens; ++t) stream_gradients<T, S, 1, VECTORS>(by, t, j, f, v, du + d, dx + at, width, count, past);
    for (int first = 0; first < ROWS; first += TOGETHER) {
        T* to = dfn + first * all + at;
        Lanes<T> sum[TOGETHER][VECTORS];
        for (int r = 0; r < TOGETHER; ++r)
            for (int i = 0; i < VECTORS; ++i) sum[r][i] = load<T>(to + r * all + i * L, count);
        for (t = 0; t < tokens; ++t)
            for (int r = 0; r < TOGETHER; ++r)
                for (int i = 0; i < VECTORS; ++i) sum[r][i] += by.dp[t][first + r] * v[t][i];
        for (int r = 0; r < TOGETHER; ++r)
            for (int i = 0; i < VECTORS; ++i) store<T>(to + r * all + i * L, sum[r][i], count);
    }
}

// dX of a block, and its part of dfn, in one pass over the streams.
template <class T, class S>
INLINE void finish_block(const S* x, const S* du, const T* fn, const Factors<T>& by, S* dx, T* dfn, int tokens,
                         int64_t width, bool past) {
    constexpr int L = LANES<T>;
    for (int j = 0; j < N; ++j) {
        int64_t d = 0;
        for (; d + 2 * L <= width; d += 2 * L)
            finish_channels<T, S, 2>(x, du, fn, by, dx, dfn, tokens, width, j, d, L, past);
        for (; d < width; d += L)
            finish_channels<T, S, 1>(x, du, fn, by, dx, dfn, tokens, width, j, d,
                                     int(std::min<int64_t>(L, width - d)), past);
    }
}

// Gradients of the parameters.
template <class T>
struct Sums {
    T *fn, *base, *scale;
};

// dX of the tokens from `begin` to `end`, and what they add to the gradients of the parameters.
template <class T, class S>
void pre_backward_range(const S* du, const T* dpost, const T* dcomb, const S* x, const Parameters<T>& p, const T* z,
                        const T* rstd, S* dx, Sums<T> sums, int64_t begin, int64_t end, int64_t width, bool past = false) {
    const std::unique_ptr<Lanes<T>[]> kept(new Lanes<T>[sinkhorn::kept_size(p.iters)]);
    Lanes<T> dbase[ROWS] = {}, dscale[ROWS] = {};
    for (int64_t first = begin; first < end; first += LANES<T>) {
        const int tokens = int(std::min<int64_t>(LANES<T>, end - first));
        T dpre[LANES<T>][N];
        for (int t = 0; t < tokens; ++t) {
            const S *g = du + (first + t) * width, *v = x + (first + t) * N * width;
            Lanes<T> sum[N] = {};
            over_channels<T>(width, [&](int64_t d, auto count) CHANNELS {
                const Lanes<T> h = load<T>(g + d, count);
                for (int j = 0; j < N; ++j) sum[j] += h * load<T>(v + j * width + d, count);
            });
            for (int j = 0; j < N; ++j) dpre[t][j] = total<T>(sum[j]);
        }
        Lanes<T> zs[ROWS], a[ROWS], da[ROWS], norm;
        sinkhorn::to_lanes<T>(z + first * ROWS, ROWS, tokens, zs);
        sinkhorn::to_lanes<T>(rstd + first, 1, tokens, &norm);
        sinkhorn::to_lanes<T>(dpre[0], N, tokens, da);
        sinkhorn::to_lanes<T>(dpost + first * N, N, tokens, da + N);
        sinkhorn::to_lanes<T>(dcomb + first * N * N, N * N, tokens, da + 2 * N);
        for (int r = 0; r < ROWS; ++r) a[r] = zs[r] * p.scale_of(r) + p.base[r];
        for (int r = 0; r < 2 * N; ++r) {
            a[r] = sigmoid<T>(a[r]);
            da[r] *= a[r] * (1 - a[r]) * T(r < N ? 1 : 2);
        }
        sinkhorn::backward<T>(da + 2 * N, a + 2 * N, p.iters, p.eps, kept.get());
        Lanes<T> shrink = {};
        for (int r = 0; r < ROWS; ++r) {
            dbase[r] += da[r];
            dscale[r] += da[r] * zs[r];
            da[r] *= p.scale_of(r);
            shrink -= da[r] * zs[r];
            da[r] *= norm;
        }
        shrink *= norm * norm / T(N * width);
        for (int j = 0; j < N; ++j) a[j] += p.eps;
        Factors<T> by;
        sinkhorn::from_lanes<T>(a, N, LANES<T>, by.pre[0]);
        sinkhorn::from_lanes<T>(da, ROWS, LANES<T>, by.dp[0]);
        sinkhorn::from_lanes<T>(&shrink, 1, LANES<T>, by.shrink);
        const int64_t at = first * width;
        finish_block<T, S>(x + N * at, du + at, p.fn, by, dx + N * at, sums.fn, tokens, width, past);
    }
    finish_stores();
    for (int r = 0; r < ROWS; ++r) {
        sums.base[r] += total<T>(dbase[r]);
        sums.scale[kind(r)] += total<T>(dscale[r]);
    }
}

// Threads sum the gradients of the parameters over their own tokens; the sums are added in the order of the tokens.
template <class T, class S>
void pre_backward(const S* du, const T* dpost, const T* dcomb, const S* x, Parameters<T> p, const T* z, const T* rstd, S* dx,
                  Sums<T> sums, int64_t tokens, int64_t width, int threads) {
    const int64_t blocks = (tokens + LANES<T> - 1) / LANES<T>, size = ROWS * N * width;
    const int64_t parts = blocks > FEW ? std::min<int64_t>(threads, blocks) : 1;
    std::vector<T> others((parts - 1) * (size + ROWS + 3));  // zeros
    const auto sums_of = [&](int64_t part) -> Sums<T> {
        T* own = others.data() + (part - 1) * (size + ROWS + 3);
        return part ? Sums<T>{own, own + size, own + size + ROWS} : sums;
    };
    const auto add = [](T* to, const T* from, int64_t n) { for (int64_t i = 0; i < n; ++i) to[i] += from[i]; };
    const bool past = around(dx, tokens * N, width);
    std::fill_n(sums.fn, size, T(0));
    std::fill_n(sums.base, ROWS, T(0));
    std::fill_n(sums.scale, 3, T(0));
#pragma omp parallel for num_threads(threads) if (parts > 1) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part)
        pre_backward_range<T, S>(du, dpost, dcomb, x, p, z, rstd, dx, sums_of(part), blocks * part / parts * LANES<T>,
                                 std::min(tokens, blocks * (part + 1) / parts * LANES<T>), width, past);
    for (int64_t part = 1; part < parts; ++part) {
        const Sums<T> of_part = sums_of(part);
        add(sums.fn, of_part.fn, size);
        add(sums.base, of_part.base, ROWS);
        add(sums.scale, of_part.scale, 3);
    }
}

template <class T, class S>
void post(const S* y, const S* x, const T* post, const T* comb, S* out, int64_t tokens, int64_t width, int threads) {
    const bool past = around(out, tokens * N, width);
#pragma omp parallel for num_threads(threads) if (tokens > FEW * LANES<T>)
    for (int64_t t = 0; t < tokens; ++t) {
        const S *v = x + t * N * width, *w = y + t * width;
        const T *p = post + t * N, *c = comb + t * N * N;
        S* to = out + t * N * width;
        over_channels<T>(width, [&](int64_t d, auto count) CHANNELS {
            Lanes<T> streams[N];
            for (int j = 0; j < N; ++j) streams[j] = load<T>(v + j * width + d, count);
            const Lanes<T> h = load<T>(w + d, count);
            for (int k = 0; k < N; ++k) {
                Lanes<T> sum = p[k] * h;
                for (int j = 0; j < N; ++j) sum += c[N * j + k] * streams[j];
                store<T>(to + k * width + d, sum, count, past);
            }
        });
        finish_stores();
    }
}

template <class T, class S>
void post_backward(const S* grad, const S* y, const S* x, const T* post, const T* comb, S* dy, S* dx, T* dpost, T* dcomb,
                   int64_t tokens, int64_t width, int threads) {
    const bool past = around(dx, tokens * N, width);
#pragma omp parallel for num_threads(threads) if (tokens > FEW * LANES<T>)
    for (int64_t t = 0; t < tokens; ++t) {
        const S *g = grad + t * N * width, *v = x + t * N * width, *w = y + t * width;
        const T *p = post + t * N, *c = comb + t * N * N;
        S *to_x = dx + t * N * width, *to_y = dy + t * width;
        Lanes<T> by_post[N] = {}, by_comb[N * N] = {};
        over_channels<T>(width, [&](int64_t d, auto count) CHANNELS {
            Lanes<T> gs[N];
            for (int k = 0; k < N; ++k) gs[k] = load<T>(g + k * width + d, count);
            const Lanes<T> h = load<T>(w + d, count);
            Lanes<T> sum = p[0] * gs[0];
            for (int k = 1; k < N; ++k) sum += p[k] * gs[k];
            store<T>(to_y + d, sum, count);
            for (int k = 0; k < N; ++k) by_post[k] += h * gs[k];
            for (int j = 0; j < N; ++j) {
                const Lanes<T> stream = load<T>(v + j * width + d, count);
                sum = c[N * j] * gs[0];
                for (int k = 1; k < N; ++k) sum += c[N * j + k] * gs[k];
                store<T>(to_x + j * width + d, sum, count, past);
                for (int k = 0; k < N; ++k) by_comb[N * j + k] += stream * gs[k];
            }
        });
        finish_stores();
        for (int k = 0; k < N; ++k) dpost[t * N + k] = total<T>(by_post[k]);
        for (int i = 0; i < N * N; ++i) dcomb[t * N * N + i] = total<T>(by_comb[i]);
    }
}

}  // namespace hyper_connection
