/* The sublayers of DeepSeek-V4, each in one call.
 *
 * Why.  A small V4 spends its time on starting operations: twenty Sinkhorn rounds on sixteen numbers
 * are over a hundred of them. Here a mixing of streams, a layer's attention (attention.h) and a
 * layer's experts are one call each. Products are called through a pointer: the integer kernels' or
 * a plain one for fp32.
 *
 * Every row is computed by the same operations in the same order whatever shares the call, and threads
 * split rows and heads, never a sum: so with row-exact products the whole pass is row-exact.
 *
 * All numbers are fp32; rows are contiguous unless a stride is given.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STREAMS_MAX 8
#include "vectors.h"

static inline float inverse_rms(const float *x, int64_t n, float eps) {
    return 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
}

/* ---- residual streams ------------------------------------------------------------------------- */

typedef struct {
    const float *fn, *base, *scale; /* [mixes, streams * hidden], [mixes], [mixes] */
    const float *norm;              /* [hidden] */
    int32_t streams, hidden, rounds; /* rounds 0: gates only, as at the end of a tower */
    float eps, norm_eps;
} Hyper;

/* Mixings of up to eight rows side by side, [s, s, 8]: every lane is a row of its own. */
static void sinkhorn(v8 *c, int32_t s, int32_t rounds, float eps) {
    for (int32_t j = 0; j < s; j++) {
        v8 top = c[j * s], sum = {0};
        for (int32_t k = 1; k < s; k++) top = max8(c[j * s + k], top);
        for (int32_t k = 0; k < s; k++) sum += c[j * s + k] = exp8(c[j * s + k] - top);
        for (int32_t k = 0; k < s; k++) c[j * s + k] = c[j * s + k] / sum + eps;
    }
    for (int32_t r = 0; r < rounds; r++) {
        for (int32_t j = 0; r && j < s; j++) {
            v8 sum = c[j * s];
            for (int32_t k = 1; k < s; k++) sum += c[j * s + k];
            const v8 inverse = 1.0f / (sum + eps);
            for (int32_t k = 0; k < s; k++) c[j * s + k] *= inverse;
        }
        for (int32_t k = 0; k < s; k++) {
            v8 sum = c[k];
            for (int32_t j = 1; j < s; j++) sum += c[j * s + k];
            const v8 inverse = 1.0f / (sum + eps);
            for (int32_t j = 0; j < s; j++) c[j * s + k] *= inverse;
        }
    }
}

/* One row: its input of the sublayer, its gates behind it, and what its mixing begins with. */
static void enter_row(const Hyper *h, const float *x, float *y, float *post, float *comb, int32_t raw) {
    const int64_t s = h->streams, d = h->hidden, mixes = h->rounds ? (s + 2) * s : s;
    float mix[(STREAMS_MAX + 2) * STREAMS_MAX];
    const float inverse = inverse_rms(x, s * d, h->norm_eps);
    dots(h->fn, mixes, x, s * d, mix);
    for (int64_t j = 0; j < mixes; j++) mix[j] = mix[j] * inverse * h->scale[j] + h->base[j];
    if (h->rounds) memcpy(comb, mix + 2 * s, s * s * sizeof *comb);
    MAP8(mix, h->rounds ? 2 * s : s, sigmoid8(it));
    for (int64_t j = 0; h->rounds && j < s; j++) post[j] = 2 * mix[s + j];
    for (int64_t j = 0; j < s; j++) mix[j] += h->eps;
    for (int64_t i = 0; i < d; i++) y[i] = mix[0] * x[i];
    for (int64_t j = 1; j < s; j++)
        for (int64_t i = 0; i < d; i++) y[i] += mix[j] * x[j * d + i];
    if (raw) return;
    const float scale = inverse_rms(y, d, h->norm_eps);
    for (int64_t i = 0; i < d; i++) y[i] = y[i] * scale * h->norm[i];
}

/* The sublayer's input `y` [n, hidden] (normed unless `raw`), and post [n, streams], comb [n, s, s]. */
void v4_enter(const Hyper *h, const float *x, int64_t n, float *y, float *post, float *comb,
              int32_t raw, int32_t threads) {
    const int64_t s = h->streams, d = h->hidden, ss = s * s;
#pragma omp parallel for num_threads(threads) if (n > 8 && threads > 1)
    for (int64_t first = 0; first < n; first += 8) {
        const int64_t rows = n - first < 8 ? n - first : 8;
        for (int64_t r = first; r < first + rows; r++)
            enter_row(h, x + r * s * d, y + r * d, post + r * s, comb + r * ss, raw);
        if (!h->rounds) continue;
        v8 c[STREAMS_MAX * STREAMS_MAX];
        for (int64_t j = 0; j < ss; j++) {
            c[j] = all8(0);
            for (int64_t r = 0; r < rows; r++) c[j][r] = comb[(first + r) * ss + j];
        }
        sinkhorn(c, h->streams, h->rounds, h->eps);
        for (int64_t j = 0; j < ss; j++)
            for (int64_t r = 0; r < rows; r++) comb[(first + r) * ss + j] = c[j][r];
    }
}

/* out_k = post_k y + sum over j of comb_jk x_j */
void v4_leave(const float *x, const float *y, const float *post, const float *comb, int64_t n, int64_t s,
              int64_t d, float *out, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (n > 1 && threads > 1)
    for (int64_t r = 0; r < n; r++) {
        const float *xr = x + r * s * d, *yr = y + r * d, *p = post + r * s, *c = comb + r * s * s;
        float *o = out + r * s * d;
        for (int64_t i = 0; i + 8 <= d; i += 8)
            for (int64_t k = 0; k < s; k++) {
                v8 t = p[k] * load8(yr + i);
                for (int64_t j = 0; j < s; j++) t = fma8(all8(c[j * s + k]), load8(xr + j * d + i), t);
                store8(o + k * d + i, t);
            }
        for (int64_t i = d / 8 * 8; i < d; i++)
            for (int64_t k = 0; k < s; k++) {
                o[k * d + i] = p[k] * yr[i];
                for (int64_t j = 0; j < s; j++) o[k * d + i] += c[j * s + k] * xr[j * d + i];
            }
    }
}

/* ---- norms and rotations ---------------------------------------------------------------------- */

static void rotate(float *x, const float *turns, int64_t pairs, float sign) {
    for (int64_t i = 0; i < pairs; i++) {
        const float re = x[2 * i], im = x[2 * i + 1], c = turns[2 * i], s = sign * turns[2 * i + 1];
        x[2 * i] = re * c - im * s;
        x[2 * i + 1] = re * s + im * c;
    }
}

/* Rows of `heads` vectors of `dim`: normed if eps >= 0 (weight may be NULL), then the last 2 * pairs
 * numbers of each vector rotated by the row's turns. */
void v4_norm_rotate(const float *x, int64_t stride, int64_t n, int64_t heads, int64_t dim,
                    const float *weight, float eps, const float *turns, int64_t pairs, float *y,
                    int32_t threads) {
#pragma omp parallel for num_threads(threads) if (n > 1 && threads > 1)
    for (int64_t r = 0; r < n; r++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = x + r * stride + h * dim;
            float *to = y + (r * heads + h) * dim;
            const float scale = eps >= 0 ? inverse_rms(from, dim, eps) : 1.0f;
            if (weight)
                for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale * weight[i];
            else
                for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale;
            rotate(to + dim - 2 * pairs, turns + r * 2 * pairs, pairs, 1);
        }
}

/* ---- products ----------------------------------------------------------------------------------- */

typedef struct {
    const void *data; /* packed for the integer kernels, or [out, in] fp32 */
    const float *bias;
    int32_t out, in, bits, pad;
} Linear;

/* The integer kernels' product, and here the same for fp32: a row reads the matrix once for all. */
#define ALONE (1 << 18) /* multiplications that one thread ends before a second one is awake */

typedef void Product(const Linear *, const float *, int32_t, float *, int8_t *, float *, float *, int32_t);

void v4_linear(const Linear *w, const float *x, int32_t n, float *y, int8_t *q, float *q_scale,
               float *q_sum, int32_t threads) {
    (void)q, (void)q_scale, (void)q_sum;
#pragma omp parallel for num_threads(threads) if (threads > 1 && (int64_t)n * w->out * w->in >= ALONE)
    for (int64_t o = 0; o < w->out; o += 4) {
        const int64_t rows = w->out - o < 4 ? w->out - o : 4;
        for (int64_t r = 0; r < n; r++)
            dots((const float *)w->data + o * w->in, rows, x + r * w->in, w->in, y + r * w->out + o);
    }
}

#include "attention.h"

/* ---- experts ---------------------------------------------------------------------------------- */

/* Which `k` experts a row visits, and with what weight. chosen: [n, k] from a table, or NULL: the best
 * by score + bias, of equal ones the first. */
void v4_route(const float *x, int64_t n, int64_t d, const float *gate, int64_t experts, const float *bias,
              const int64_t *chosen, int64_t k, float scale, int64_t *ids, float *weights) {
    float score[experts], rank[experts];
    for (int64_t r = 0; r < n; r++) {
        dots(gate, experts, x + r * d, d, score);
        MAP8(score, experts, pick8(it > 20, it, log1p8(exp8(it))));
        for (int64_t e = 0; e < experts; e++) {
            score[e] = sqrtf(score[e]);
            rank[e] = bias ? score[e] + bias[e] : 0;
        }
        float sum = 0;
        for (int64_t i = 0; i < k; i++) {
            int64_t best = 0;
            if (chosen)
                best = chosen[r * k + i];
            else
                for (int64_t e = 1; e < experts; e++)
                    if (rank[e] > rank[best]) best = e;
            rank[best] = -INFINITY;
            ids[r * k + i] = best;
            sum += weights[r * k + i] = score[best];
        }
        for (int64_t i = 0; i < k; i++) weights[r * k + i] *= scale / (sum + 1e-20f);
    }
}

/* silu(min(gate, limit)) * clamp(up, limit), from [n, 2 * size], times a weight for each row. */
void v4_swiglu(const float *x, int64_t n, int64_t size, float limit, const float *weight, float *y) {
    for (int64_t r = 0; r < n; r++) {
        const float *g = x + r * 2 * size, *u = g + size, w = weight ? weight[r] : 1.0f;
        float *to = y + r * size;
        for (int64_t i = 0; i < size; i++) to[i] = fminf(g[i], limit);
        MAP8(to, size, it * sigmoid8(it));
        for (int64_t i = 0; i < size; i++) to[i] *= fmaxf(fminf(u[i], limit), -limit) * w;
    }
}

typedef struct {
    const float *gate, *bias;              /* [experts, hidden]; [experts] or NULL */
    const Linear *const *inner, *const *outer; /* [experts + 1], the shared one last */
    Product *product;
    int64_t experts, hidden, size, k;
    float scale, limit;
} Experts;

/* All experts of a layer: y [n, hidden]. A row's sum runs over the shared expert and then its own in
 * rising order, so it does not depend on its neighbours. */
void v4_experts(const Experts *m, const float *x, int64_t n, const int64_t *chosen, float *y,
                int32_t threads) {
    const int64_t d = m->hidden, s = m->size, k = m->k, wide = d > s ? d : s;
    int64_t *ids = malloc(2 * n * k * sizeof *ids), *rows = ids + n * k;
    float *f = malloc((n * k + n * (3 * s + 2 * d + wide / 16 + 3)) * sizeof *f), *weights = f;
    float *own = f + n * k, *in = own + n, *h = in + n * d, *g = h + n * s, *out = g + 2 * n * s;
    float *q_scale = out + n * d, *q_sum = q_scale + n * (wide / 32 + 1);
    int8_t *q = malloc(n * wide);
    v4_route(x, n, d, m->gate, m->experts, m->bias, chosen, k, m->scale, ids, weights);
    m->product(m->inner[m->experts], x, n, g, q, q_scale, q_sum, threads);
    v4_swiglu(g, n, s, m->limit, NULL, h);
    m->product(m->outer[m->experts], h, n, y, q, q_scale, q_sum, threads);
    for (int64_t e = 0; e < m->experts; e++) {
        int64_t count = 0;
        for (int64_t i = 0; i < n * k; i++) {
            if (ids[i] != e) continue;
            if (count && rows[count - 1] == i / k) { /* a table may name an expert twice */
                own[count - 1] += weights[i];
                continue;
            }
            rows[count] = i / k;
            own[count] = weights[i];
            memcpy(in + count++ * d, x + i / k * d, d * sizeof *in);
        }
        if (!count) continue;
        m->product(m->inner[e], in, count, g, q, q_scale, q_sum, threads);
        v4_swiglu(g, count, s, m->limit, own, h);
        m->product(m->outer[e], h, count, out, q, q_scale, q_sum, threads);
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = 0; i < d; i++) y[rows[c] * d + i] += out[c * d + i];
    }
    free(ids);
    free(f);
    free(q);
}

/* ---- the sequential stage of a DSpark block ------------------------------------------------------ */

typedef struct {
    const float *w1;         /* [vocab, rank] */
    const float *confidence; /* [hidden + rank] or NULL */
    const Linear *w2;        /* [vocab, rank] */
    Product *product;
    int64_t hidden;
} Walk;

/* Tokens and confidences of one block, greedily: row i of base [n, vocab] gets the bias of the token in
 * front of it, `token` in front of the first; of equal logits the lowest id wins. x [n, hidden]. */
void v4_walk(const Walk *m, const float *base, const float *x, int64_t n, int64_t token, int64_t *tokens,
             float *sure, int32_t threads) {
    const int64_t vocab = m->w2->out, rank = m->w2->in, d = m->hidden;
    float *bias = malloc((vocab + 2 * (rank / 32 + 1)) * sizeof *bias), *q_scale = bias + vocab;
    int8_t *q = malloc(rank);
    for (int64_t i = 0; i < n; i++) {
        const float *before = m->w1 + token * rank, *row = base + i * vocab;
        if (m->confidence)
            sure[i] = 1.0f / (1.0f + expf(-dot(m->confidence, x + i * d, d)
                                          - dot(m->confidence + d, before, rank)));
        m->product(m->w2, before, 1, bias, q, q_scale, q_scale + rank / 32 + 1, threads);
        float best[8];
        int64_t at[8];
        for (int64_t l = 0; l < 8; l++) best[l] = -INFINITY, at[l] = l;
        int64_t v = 0;
        for (; v + 8 <= vocab; v += 8)
            for (int64_t l = 0; l < 8; l++) {
                const float logit = row[v + l] + bias[v + l];
                const int higher = logit > best[l];
                best[l] = higher ? logit : best[l];
                at[l] = higher ? v + l : at[l];
            }
        for (; v < vocab; v++)
            if (row[v] + bias[v] > best[0]) best[0] = row[v] + bias[v], at[0] = v;
        for (int64_t l = 1; l < 8; l++)
            if (best[l] > best[0] || (best[l] == best[0] && at[l] < at[0])) best[0] = best[l], at[0] = at[l];
        tokens[i] = token = at[0];
    }
    free(bias);
    free(q);
}
