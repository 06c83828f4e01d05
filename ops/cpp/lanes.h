// Vectors as wide as the processor's registers, and how tensors get into and out of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class T, int BYTES>
struct VectorOf {
    typedef T type __attribute__((vector_size(BYTES)));
};
template <class T>
using Lanes = typename VectorOf<T, REGISTER>::type;
template <class T>
constexpr int LANES = REGISTER / sizeof(T);

struct bf16 {
    uint16_t bits;
};

// The first `count` elements at p, as T; the lanes behind them are zero.
template <class T>
INLINE Lanes<T> load(const T* p, int count) {
    Lanes<T> v = {};
    if (count == LANES<T>)
        std::memcpy(&v, p, sizeof v);
    else
        std::memcpy(&v, p, count * sizeof(T));
    return v;
}

template <class T>
INLINE Lanes<T> load(const bf16* p, int count) {
    static_assert(std::is_same_v<T, float>);
    typename VectorOf<uint16_t, REGISTER / 2>::type narrow = {};
    if (count == LANES<T>)
        std::memcpy(&narrow, p, sizeof narrow);
    else
        std::memcpy(&narrow, p, count * sizeof(bf16));
    const Lanes<uint32_t> bits = __builtin_convertvector(narrow, Lanes<uint32_t>) << 16;
    Lanes<T> v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

template <class T>
INLINE void store(T* p, Lanes<T> v, int count) {
    if (count == LANES<T>)
        std::memcpy(p, &v, sizeof v);
    else
        std::memcpy(p, &v, count * sizeof(T));
}

// Rounds to nearest, ties to even; a NaN stays one.
template <class T>
INLINE void store(bf16* p, Lanes<T> v, int count) {
    static_assert(std::is_same_v<T, float>);
    Lanes<uint32_t> bits;
    std::memcpy(&bits, &v, sizeof bits);
    bits = (v == v) ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : Lanes<uint32_t>{} + 0x7fc0;
    const auto narrow = __builtin_convertvector(bits, typename VectorOf<uint16_t, REGISTER / 2>::type);
    if (count == LANES<T>)
        std::memcpy(p, &narrow, sizeof narrow);
    else
        std::memcpy(p, &narrow, count * sizeof(bf16));
}

// A result larger than a core's cache is gone from it before it is read. Its lines need not be fetched to be overwritten:
// they go around the cache, which is a third less to move where a result is as large as what it is made of.
constexpr int64_t CORE_CACHE = 4 << 20;

// Whether the rows of this tensor may go around the cache: they have to be whole and aligned lines.
template <class S>
INLINE bool around(const S* tensor, int64_t rows, int64_t width) {
    const int64_t bytes = width * int64_t(sizeof(S));
    return rows * bytes > CORE_CACHE && bytes % 64 == 0 && reinterpret_cast<uintptr_t>(tensor) % 64 == 0;
}

template <class T, class S>
INLINE void store_around(S* p, Lanes<T> v) {
    alignas(REGISTER) S part[LANES<T>];
    store<T>(part, v, LANES<T>);
#if defined(__SSE2__)
    if constexpr (sizeof part == 16) _mm_stream_si128(reinterpret_cast<__m128i*>(p), *reinterpret_cast<__m128i*>(part));
#if defined(__AVX__)
    if constexpr (sizeof part == 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), *reinterpret_cast<__m256i*>(part));
#endif
#if defined(__AVX512F__)
    if constexpr (sizeof part == 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), *reinterpret_cast<__m512i*>(part));
#endif
    if constexpr (sizeof part < 16)
#endif
        std::memcpy(p, part, sizeof part);
}

template <class T, class S>
INLINE void store(S* p, Lanes<T> v, int count, bool past) {
    if (past)
        store_around<T>(p, v);
    else
        store<T>(p, v, count);
}

// To be called after stores around the cache, before another thread may read.
INLINE void finish_stores() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

template <class T, int BYTES = REGISTER>
INLINE T total(typename VectorOf<T, BYTES>::type v) {
    if constexpr (BYTES > 16) {
        typename VectorOf<T, BYTES / 2>::type low, high;
        std::memcpy(&low, &v, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return total<T, BYTES / 2>(low + high);
    } else {
        T sum = 0;
        for (int i = 0; i < BYTES / int(sizeof(T)); ++i) sum += v[i];
        return sum;
    }
}

// body(d, count) for d = 0, LANES, ...: count is a constant but for the last channels.
template <class T, class Body>
INLINE void over_channels(int64_t width, Body body) {
    int64_t d = 0;
    for (; d + LANES<T> <= width; d += LANES<T>) body(d, std::integral_constant<int, LANES<T>>{});
    if (d < width) body(d, int(width - d));
}

// e^x for x <= 0 and NaN: the Cephes polynomial on [-ln(2)/2, ln(2)/2]; zero where the result would be subnormal.
template <class T>
INLINE Lanes<T> exponential(Lanes<T> x) {
    if constexpr (std::is_same_v<T, float>) {
        constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23
        const Lanes<T> n = (x * 1.44269504f + to_integer) - to_integer;
        const Lanes<T> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
        Lanes<T> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
        y = y * r + 8.3334519073e-3f;
        y = y * r + 4.1665795894e-2f;
        y = y * r + 1.6666665459e-1f;
        y = y * r + 5.0000001201e-1f;
        y = y * (r * r) + r + 1.0f;
        const Lanes<int32_t> power = (__builtin_convertvector(n, Lanes<int32_t>) + 127) << 23;
        Lanes<T> scale;
        std::memcpy(&scale, &power, sizeof scale);
        y = (x < -87.0f) ? Lanes<T>{} : y * scale;
        return (x == x) ? y : x;
    } else {
        for (int i = 0; i < LANES<T>; ++i) x[i] = std::exp(x[i]);
        return x;
    }
}

template <class T>
INLINE Lanes<T> sigmoid(Lanes<T> x) {
    const Lanes<T> e = exponential<T>((x < 0) ? x : -x);
    return ((x < 0) ? e : Lanes<T>{} + 1) / (1 + e);
}
