// The rotation of neighbouring pairs of channels, from rows of one layout to rows of another, or in place.
#pragma once

#include "lanes.h"

namespace rope {

// Where [batch, tokens, heads] rows lie, in elements.
struct Rows {
    int64_t batch, token, head;
};

INLINE float wide(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}
INLINE float wide(float x) { return x; }
INLINE double wide(double x) { return x; }

INLINE void narrow(float v, bf16* to) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    to->bits = uint16_t(v == v ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
}
INLINE void narrow(float v, float* to) { *to = v; }
INLINE void narrow(double v, double* to) { *to = v; }

// a, b -> a cos - b sin, a sin + b cos; cos and sin [batch, tokens, pairs], -sin where `inverse`. The `plain` channels before
// the pairs are copied, none of them in place.
template <class T, class S>
void run(const S* x, S* out, const T* cos, const T* sin, int64_t batch, int64_t tokens, int64_t heads, int64_t plain,
         int64_t pairs, Rows from, Rows to, bool inverse, int threads) {
    constexpr int AHEAD = 16;  // rows: they are too far apart for the processor to foresee
    const int64_t bytes = 2 * pairs * int64_t(sizeof(S));
#pragma omp parallel for num_threads(threads) if (batch * tokens * heads * pairs > 1 << 15)
    for (int64_t i = 0; i < batch * tokens; ++i) {
        const T *c = cos + i * pairs, *s = sin + i * pairs, sign = inverse ? -1 : 1;
        const S* row = x + i / tokens * from.batch + i % tokens * from.token;
        S* turned = out + i / tokens * to.batch + i % tokens * to.token;
        for (int64_t h = 0; h < heads; ++h, row += from.head, turned += to.head) {
            if (x != out) std::memcpy(turned - plain, row - plain, plain * sizeof(S));
            for (int64_t at = 0; at < bytes; at += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(row + AHEAD * from.head) + at);
#pragma GCC ivdep  // out is x or another tensor: a pair is read before it is written
            for (int64_t j = 0; j < pairs; ++j) {
                const T a = wide(row[2 * j]), b = wide(row[2 * j + 1]), sine = sign * s[j];
                narrow(a * c[j] - b * sine, turned + 2 * j);
                narrow(a * sine + b * c[j], turned + 2 * j + 1);
            }
        }
    }
}

}  // namespace rope
