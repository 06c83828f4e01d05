// The normalisations of 4 x 4 matrices, one token to a lane: element [j][k] of LANES tokens is the vector m[4 j + k].
#pragma once

#include <memory>

#include "lanes.h"

namespace sinkhorn {

constexpr int N = 4, SIZE = N * N;

template <class T>
INLINE void softmax(const Lanes<T>* x, Lanes<T>* s) {
    for (int j = 0; j < N; ++j) {
        Lanes<T> most = x[N * j], sum = {};
        for (int k = 1; k < N; ++k) most = (x[N * j + k] > most) ? x[N * j + k] : most;
        for (int k = 0; k < N; ++k) sum += s[N * j + k] = exponential<T>(x[N * j + k] - most);
        for (int k = 0; k < N; ++k) s[N * j + k] /= sum;
    }
}

// Places of the four elements that step i makes sum to 1: odd steps are over columns, even ones over rows.
INLINE int place(bool columns, int group, int i) { return columns ? N * i + group : N * group + i; }

template <class T>
INLINE void normalise(bool columns, const Lanes<T>* from, Lanes<T>* to, T eps) {
    for (int group = 0; group < N; ++group) {
        Lanes<T> sum = Lanes<T>{} + eps;
        for (int i = 0; i < N; ++i) sum += from[place(columns, group, i)];
        const Lanes<T> factor = 1 / sum;
        for (int i = 0; i < N; ++i) to[place(columns, group, i)] = from[place(columns, group, i)] * factor;
    }
}

template <class T>
void forward(Lanes<T>* m, int iters, T eps) {
    Lanes<T> c[SIZE];
    softmax<T>(m, c);
    for (int i = 0; i < SIZE; ++i) c[i] += eps;
    normalise<T>(true, c, c, eps);
    for (int i = 1; i < iters; ++i) {
        normalise<T>(false, c, c, eps);
        normalise<T>(true, c, c, eps);
    }
    for (int i = 0; i < SIZE; ++i) m[i] = c[i];
}

// Matrices that the backward keeps of a block of tokens.
inline int64_t kept_size(int iters) { return int64_t(2 * std::max(iters, 1)) * SIZE; }

// g -= C sum(g): the gradient of log C, through the step that gave C.
template <class T>
INLINE void pull(bool columns, Lanes<T>* g, const Lanes<T>* c) {
    for (int group = 0; group < N; ++group) {
        Lanes<T> sum = {};
        for (int i = 0; i < N; ++i) sum += g[place(columns, group, i)];
        for (int i = 0; i < N; ++i) g[place(columns, group, i)] -= c[place(columns, group, i)] * sum;
    }
}

// g: the gradient of the result, and then that of the logits m.
template <class T>
void backward(Lanes<T>* gradient, const Lanes<T>* m, int iters, T eps, Lanes<T>* kept) {
    const int steps = 2 * std::max(iters, 1) - 1;
    Lanes<T> s[SIZE], g[SIZE];
    softmax<T>(m, s);
    for (int i = 0; i < SIZE; ++i) kept[i] = s[i] + eps;
    normalise<T>(true, kept, kept + SIZE, eps);
    for (int i = 2; i < steps; i += 2) {
        normalise<T>(false, kept + SIZE * (i - 1), kept + SIZE * i, eps);
        normalise<T>(true, kept + SIZE * i, kept + SIZE * (i + 1), eps);
    }
    for (int i = 0; i < SIZE; ++i) g[i] = gradient[i] * kept[SIZE * steps + i];
    for (int i = steps; i > 1; i -= 2) {
        pull<T>(true, g, kept + SIZE * i);
        pull<T>(false, g, kept + SIZE * (i - 1));
    }
    pull<T>(true, g, kept + SIZE);
    for (int i = 0; i < SIZE; ++i) g[i] *= s[i] / kept[i];
    pull<T>(false, g, s);
    for (int i = 0; i < SIZE; ++i) gradient[i] = g[i];
}

// Rows of `columns` numbers of `count` tokens, turned so that a token is a lane; what is not there is zero.
template <class T>
INLINE void to_lanes(const T* rows, int columns, int count, Lanes<T>* m) {
    for (int c = 0; c < columns; ++c) m[c] = Lanes<T>{};
    T* at = reinterpret_cast<T*>(m);
    for (int t = 0; t < count; ++t)
        for (int c = 0; c < columns; ++c) at[c * LANES<T> + t] = rows[t * columns + c];
}

template <class T>
INLINE void from_lanes(const Lanes<T>* m, int columns, int count, T* rows) {
    const T* at = reinterpret_cast<const T*>(m);
    for (int t = 0; t < count; ++t)
        for (int c = 0; c < columns; ++c) rows[t * columns + c] = at[c * LANES<T> + t];
}

template <class T>
void run(const T* logits, T* out, int64_t tokens, int iters, T eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 4096)
    for (int64_t t = 0; t < tokens; t += LANES<T>) {
        const int count = int(std::min<int64_t>(LANES<T>, tokens - t));
        Lanes<T> m[SIZE];
        to_lanes<T>(logits + t * SIZE, SIZE, count, m);
        forward<T>(m, iters, eps);
        from_lanes<T>(m, SIZE, count, out + t * SIZE);
    }
}

template <class T>
void run_backward(const T* grad, const T* logits, T* out, int64_t tokens, int iters, T eps, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 4096)
    for (int64_t t = 0; t < tokens; t += LANES<T>) {
        const int count = int(std::min<int64_t>(LANES<T>, tokens - t));
        const std::unique_ptr<Lanes<T>[]> kept(new Lanes<T>[kept_size(iters)]);
        Lanes<T> m[SIZE], g[SIZE];
        to_lanes<T>(logits + t * SIZE, SIZE, count, m);
        to_lanes<T>(grad + t * SIZE, SIZE, count, g);
        backward<T>(g, m, iters, eps, kept.get());
        from_lanes<T>(g, SIZE, count, out + t * SIZE);
    }
}

}  // namespace sinkhorn
