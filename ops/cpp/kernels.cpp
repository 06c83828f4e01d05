// What the operators call: CPU kernels of dsv4::sinkhorn, dsv4::hc_pre and dsv4::hc_post for four streams.
//
// Built once for each pair of COMPUTE, the type of all that is computed, and STREAM, that of streams in memory. Tensors are
// contiguous; `threads` is how many threads may work.

#include "attention.h"
#include "hyper_connection.h"
#include "hyper_connection_fused.h"
#include "rope.h"
#include "sinkhorn.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using T = COMPUTE;
using S = STREAM;

EXPORT void dsv4_rope(const S* x, S* out, const T* cos, const T* sin, int64_t batch, int64_t tokens, int64_t heads,
                      int64_t plain, int64_t pairs, int64_t x_batch, int64_t x_token, int64_t x_head, int64_t out_batch,
                      int64_t out_token, int64_t out_head, int64_t inverse, int64_t threads) {
    rope::run<T, S>(x, out, cos, sin, batch, tokens, heads, plain, pairs, {x_batch, x_token, x_head},
                    {out_batch, out_token, out_head}, inverse != 0, int(threads));
}

EXPORT void dsv4_sinkhorn(const T* logits, T* out, int64_t tokens, int64_t iters, double eps, int64_t threads) {
    sinkhorn::run<T>(logits, out, tokens, int(iters), T(eps), int(threads));
}

EXPORT void dsv4_sinkhorn_backward(const T* grad, const T* logits, T* out, int64_t tokens, int64_t iters, double eps,
                                   int64_t threads) {
    sinkhorn::run_backward<T>(grad, logits, out, tokens, int(iters), T(eps), int(threads));
}

EXPORT void dsv4_hc_pre(const S* streams, const T* base, const T* scale, T* z, S* u, T* post, T* comb, T* rstd,
                        int64_t tokens, int64_t width, int64_t iters, double eps, double norm_eps, int64_t threads) {
    hyper_connection::pre<T, S>(streams, {nullptr, base, scale, int(iters), T(eps)}, T(norm_eps), z, u, post, comb, rstd,
                                tokens, width, int(threads));
}

EXPORT void dsv4_hc_pre_backward(const S* grad, const T* grad_post, const T* grad_comb, const S* streams, const T* fn,
                                 const T* base, const T* scale, const T* z, const T* rstd, S* dstreams, T* dfn, T* dbase,
                                 T* dscale, int64_t tokens, int64_t width, int64_t iters, double eps, int64_t threads) {
    hyper_connection::pre_backward<T, S>(grad, grad_post, grad_comb, streams, {fn, base, scale, int(iters), T(eps)}, z, rstd,
                                         dstreams, {dfn, dbase, dscale}, tokens, width, int(threads));
}

EXPORT void dsv4_hc_post(const S* y, const S* streams, const T* post, const T* comb, S* out, int64_t tokens, int64_t width,
                         int64_t threads) {
    hyper_connection::post<T, S>(y, streams, post, comb, out, tokens, width, int(threads));
}

EXPORT void dsv4_hc_post_backward(const S* grad, const S* y, const S* streams, const T* post, const T* comb, S* dy,
                                  S* dstreams, T* dpost, T* dcomb, int64_t tokens, int64_t width, int64_t threads) {
    hyper_connection::post_backward<T, S>(grad, y, streams, post, comb, dy, dstreams, dpost, dcomb, tokens, width,
                                          int(threads));
}

#define BLOCK                                                                                                            \
    const int64_t *start, const int64_t *entry_end, const int64_t *ids, int64_t batch, int64_t queries, int64_t heads,    \
        int64_t n_window, int64_t n_entries, int64_t all_entries, int64_t chosen, int64_t first, int64_t low, int64_t window, \
        int64_t gathered
#define AT                                                                                                               \
    {start, entry_end, ids, batch, queries, heads, n_window, n_entries, all_entries, chosen, first, low, window, gathered != 0}

EXPORT void dsv4_attention_weights(T* z, const T* sink, T* peak, T* total, BLOCK, int64_t threads) {
    attention::weights<T>(z, sink, peak, total, AT, int(threads));
}

EXPORT void dsv4_attention_weights_backward(T* z, T* dw, const T* lse, const T* delta, BLOCK, int64_t threads) {
    attention::weights_backward<T>(z, dw, lse, delta, AT, int(threads));
}

EXPORT void dsv4_hc_post_pre(const S* y, const S* streams, const T* post, const T* comb, const T* fn, const T* base,
                             const T* scale, S* new_streams, S* u, T* new_post, T* new_comb, T* z, T* rstd, int64_t tokens,
                             int64_t width, int64_t iters, double eps, double norm_eps, int64_t threads) {
    hyper_connection::post_pre<T, S>(y, streams, post, comb, {fn, base, scale, int(iters), T(eps)}, T(norm_eps), new_streams,
                                     u, new_post, new_comb, z, rstd, tokens, width, int(threads));
}

EXPORT void dsv4_hc_post_pre_backward(const S* grad_streams, const S* grad_u, const T* grad_post, const T* grad_comb,
                                      const S* y, const S* streams, const T* post, const T* comb, const S* new_streams,
                                      const T* fn, const T* base, const T* scale, const T* z, const T* rstd, S* dy,
                                      S* dstreams, T* dpost, T* dcomb, T* dfn, T* dbase, T* dscale, int64_t tokens,
                                      int64_t width, int64_t iters, double eps, int64_t threads) {
    hyper_connection::post_pre_backward<T, S>(grad_streams, grad_u, grad_post, grad_comb,
                                              {y, streams, post, comb, dy, dstreams, dpost, dcomb}, new_streams,
                                              {fn, base, scale, int(iters), T(eps)}, z, rstd, {dfn, dbase, dscale}, tokens,
                                              width, int(threads));
}
