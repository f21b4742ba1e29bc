/* Row-exact integer kernels for one pass of a Llama-family decoder on a CPU.
 *
 * What.  Matrices keep the blocks of 32 columns they were quantised in (4 or 8 bits, scale and, for
 * 4 bits, minimum per block and output row); activations are quantised to 8 bits per block of 32.
 * Products are summed as integers inside a block, and as floats over the blocks in rising order.
 *
 * Why.  Verifying k drafted tokens must give the bits that decoding them one by one would have given.
 * So no row of a pass may depend on which rows share it: every row is processed by the same operations
 * in the same order, whatever `n`, the thread count or the row's place. Keep it so: no reduction across
 * threads, no shortcut for one row that rounds differently, explicit fused multiply-adds only (the file
 * is compiled with -ffp-contract=off).
 *
 * It does not promise speed without AVX2 (a plain C version of the same arithmetic takes over, with the
 * same bits) and knows nothing of sequences: a row has a slot, a position and a range of keys.
 */
#include <sched.h>

#include "blocks.h"

typedef struct {
    Linear qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;      /* [head_dim] or NULL */
    int32_t window;                    /* 0: none */
    int32_t rotate;
} Layer;

typedef struct {
    int32_t hidden, inter, heads, kv_heads, head_dim, max_context, threads;
    float eps, attn_scale;
} Dims;

typedef struct {
    int32_t n, stride;      /* rows; floats between rows of `wide` */
    const int64_t *position, *slot, *end; /* a row reads the keys in front of `end` */
    const float *cos, *sin; /* [n, head_dim / 2] */
    float *x;               /* [n, hidden] residual stream, updated in place */
    float *wide;            /* [n, stride], stride = max(hidden, qkv, 2 * inter) */
    float *attn;            /* [n, heads * head_dim] */
    float *scores;          /* [threads, heads / kv_heads, max_context] */
    int8_t *q;              /* [n, max in] quantised activations */
    float *q_scale, *q_sum; /* [n, max in / 32] scale; scale * sum of the block's integers */
    const int32_t *keep;    /* [layers of the call] where in `kept` to copy x behind a layer, or -1 */
    float *kept;            /* [copies, n, hidden] */
} Pass;

/* ---- attention ------------------------------------------------------------------------------- */

/* Keys of a slot and head lie in groups of 8 positions, [context / 8, head_dim, 8], so that eight
 * scores are summed side by side over the head's dimensions; values lie as [context, head_dim]. The
 * context of a slot is a multiple of CHUNK. */

static void store_kv(const Dims *d, float *keys, float *values, int64_t slot, int64_t pos,
                     const float *k, const float *v) {
    const int64_t hd = d->head_dim, ctx = d->max_context;
    for (int64_t h = 0; h < d->kv_heads; h++) {
        const int64_t base = (slot * d->kv_heads + h) * ctx * hd;
        float *dst = keys + base + pos / 8 * 8 * hd + pos % 8;
        for (int64_t i = 0; i < hd; i++) dst[8 * i] = k[h * hd + i];
        memcpy(values + base + pos * hd, v + h * hd, hd * sizeof(float));
    }
}

#define CHUNK 32 /* positions that are read from the cache once for all query heads that share them */

#if FAST
typedef __m256 Eight;
#define ZERO() _mm256_setzero_ps()
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define ADD_PRODUCT(acc, scalar, p) acc = _mm256_fmadd_ps(_mm256_set1_ps(scalar), _mm256_loadu_ps(p), acc)
#else
typedef struct {
    float at[8];
} Eight;
#define ZERO() ((Eight){{0}})
#define LOAD(p) (*(const Eight *)(p))
#define STORE(p, v) (*(Eight *)(p) = (v))
#define ADD_PRODUCT(acc, scalar, p) \
    for (int j_ = 0; j_ < 8; j_++) (acc).at[j_] = fmaf(scalar, (p)[j_], (acc).at[j_])
#endif

/* s[0 .. 32): query times 32 keys, each sum over the dimensions in order. */
static void score_chunk(const float *query, const float *keys, int64_t hd, float *s) {
    Eight a = ZERO(), b = ZERO(), c = ZERO(), e = ZERO();
    for (int64_t i = 0; i < hd; i++, keys += 8) {
        ADD_PRODUCT(a, query[i], keys);
        ADD_PRODUCT(b, query[i], keys + 8 * hd);
        ADD_PRODUCT(c, query[i], keys + 16 * hd);
        ADD_PRODUCT(e, query[i], keys + 24 * hd);
    }
    STORE(s, a), STORE(s + 8, b), STORE(s + 16, c), STORE(s + 24, e);
}

/* out[0 .. hd) += sum over t of s[t] * values[t], positions in order. */
static void add_values(const float *s, const float *values, int64_t count, int64_t hd, float *out) {
    int64_t i = 0;
    for (; i + 32 <= hd; i += 32) {
        Eight a = LOAD(out + i), b = LOAD(out + i + 8), c = LOAD(out + i + 16), e = LOAD(out + i + 24);
        for (int64_t t = 0; t < count; t++) {
            const float *v = values + t * hd + i;
            ADD_PRODUCT(a, s[t], v);
            ADD_PRODUCT(b, s[t], v + 8);
            ADD_PRODUCT(c, s[t], v + 16);
            ADD_PRODUCT(e, s[t], v + 24);
        }
        STORE(out + i, a), STORE(out + i + 8, b), STORE(out + i + 16, c), STORE(out + i + 24, e);
    }
    for (; i < hd; i += 8) {
        Eight a = LOAD(out + i);
        for (int64_t t = 0; t < count; t++) ADD_PRODUCT(a, s[t], values + t * hd + i);
        STORE(out + i, a);
    }
}

/* One row and one key/value head: all the query heads that share it. Reads positions lo .. hi - 1. */
static void attend(const Dims *d, const float *keys, const float *values, const float *q, float *scores,
                   int64_t lo, int64_t hi, float *out) {
    const int64_t hd = d->head_dim, ctx = d->max_context, group = d->heads / d->kv_heads;
    for (int64_t t = lo / CHUNK * CHUNK; t < hi; t += CHUNK)
        for (int64_t g = 0; g < group; g++)
            score_chunk(q + g * hd, keys + t * hd, hd, scores + g * ctx + t);
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * ctx, top = -INFINITY;
        for (int64_t t = lo; t < hi; t++) {
            s[t] *= d->attn_scale;
            top = s[t] > top ? s[t] : top;
        }
        exp_in_place(s + lo, hi - lo, top);
        memset(out + g * hd, 0, hd * sizeof(float));
    }
    for (int64_t t = lo; t < hi; t += CHUNK)
        for (int64_t g = 0; g < group; g++)
            add_values(scores + g * ctx + t, values + t * hd, hi - t < CHUNK ? hi - t : CHUNK, hd,
                       out + g * hd);
    for (int64_t g = 0; g < group; g++) {
        float total = 0.0f;
        for (int64_t t = lo; t < hi; t++) total += scores[g * ctx + t];
        const float inv = 1.0f / total;
        for (int64_t i = 0; i < hd; i++) out[g * hd + i] *= inv;
    }
}

static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = fmaf(a, cos[i], -(b * sin[i]));
        x[half + i] = fmaf(b, cos[i], a * sin[i]);
    }
}

static void scale_by_norm(float *x, const float *weight, int64_t n, float eps, float *out) {
    const float inv = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * inv * weight[i];
}

/* ---- one layer of one pass -------------------------------------------------------------------- */

/* Threads meet here between the stages of a layer, whose uneven parts take microseconds. OpenMP's own
 * barrier spins for milliseconds before it gives way: with other work on the machine a pass took a
 * hundred times longer. Giving way at once is no better, it hands over whole time slices. */
typedef struct {
    int arrived, round;
} Barrier;

static void meet(Barrier *b, int threads) {
    const int round = __atomic_load_n(&b->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&b->round, __ATOMIC_ACQUIRE) == round; spins++)
        if (spins > 50000) sched_yield();
}

#define FOR_MY_ROWS for (int64_t r = (int64_t)p->n * tid / threads; r < (int64_t)p->n * (tid + 1) / threads; r++)

static void quantise(const Pass *p, const float *x, int64_t n, int64_t r) {
    quantise_row(x, n, p->q + r * n, p->q_scale + r * (n / BLOCK), p->q_sum + r * (n / BLOCK));
}

static void multiply(const Pass *p, const Linear *w, float *y, int64_t ldy, int add, int tid, int threads) {
    product(w, p->n, p->q, p->q_scale, p->q_sum, y, ldy, add, tid, threads);
}

static void layer(const Dims *d, const Layer *l, float *keys, float *values, const Pass *p,
                  Barrier *barrier, int tid, int threads) {
    const int64_t hd = d->head_dim, nq = d->heads * hd, nkv = d->kv_heads * hd, inter = d->inter;
    const int64_t ld = p->stride, group = d->heads / d->kv_heads;
    FOR_MY_ROWS { /* `wide` is free here: it holds the normalised row on its way to 8 bits */
        float *normed = p->wide + r * ld;
        scale_by_norm(p->x + r * d->hidden, l->attn_norm, d->hidden, d->eps, normed);
        quantise(p, normed, d->hidden, r);
    }
    meet(barrier, threads);
    multiply(p, &l->qkv, p->wide, ld, 0, tid, threads);
    meet(barrier, threads);
    FOR_MY_ROWS {
        float *q = p->wide + r * ld, *k = q + nq;
        const float *cos = p->cos + r * (hd / 2), *sin = p->sin + r * (hd / 2);
        for (int64_t h = 0; h < d->heads + d->kv_heads; h++) {
            const float *norm = h < d->heads ? l->q_norm : l->k_norm;
            if (norm) scale_by_norm(q + h * hd, norm, hd, d->eps, q + h * hd);
            if (l->rotate) rotate(q + h * hd, cos, sin, hd / 2);
        }
        store_kv(d, keys, values, p->slot[r], p->position[r], k, k + nkv);
    }
    meet(barrier, threads);
    for (int64_t u = tid; u < (int64_t)p->n * d->kv_heads; u += threads) {
        const int64_t r = u / d->kv_heads, h = u % d->kv_heads, hi = p->end[r];
        const int64_t lo = l->window && hi > l->window ? hi - l->window : 0;
        const int64_t base = (p->slot[r] * d->kv_heads + h) * d->max_context * hd;
        attend(d, keys + base, values + base, p->wide + r * ld + h * group * hd,
               p->scores + (int64_t)tid * group * d->max_context, lo, hi,
               p->attn + r * nq + h * group * hd);
    }
    meet(barrier, threads);
    FOR_MY_ROWS quantise(p, p->attn + r * nq, nq, r);
    meet(barrier, threads);
    multiply(p, &l->o, p->x, d->hidden, 1, tid, threads);
    meet(barrier, threads);
    FOR_MY_ROWS {
        float *normed = p->wide + r * ld;
        scale_by_norm(p->x + r * d->hidden, l->mlp_norm, d->hidden, d->eps, normed);
        quantise(p, normed, d->hidden, r);
    }
    meet(barrier, threads);
    multiply(p, &l->gate_up, p->wide, ld, 0, tid, threads);
    meet(barrier, threads);
    FOR_MY_ROWS {
        float *gate = p->wide + r * ld, *up = gate + inter;
        for (int64_t i = 0; i < inter; i++) gate[i] = gate[i] / (1.0f + exp_(-gate[i])) * up[i];
        quantise(p, gate, inter, r);
    }
    meet(barrier, threads);
    multiply(p, &l->down, p->x, d->hidden, 1, tid, threads);
    meet(barrier, threads);
}

/* `count` layers; keys and values of the first one, those of the next lie `cache_stride` floats on. */
void dspark_layers(const Dims *d, const Layer *layers, int32_t count, float *keys, float *values,
                   int64_t cache_stride, const Pass *p) {
    Barrier barrier = {0, 0};
#pragma omp parallel num_threads(d->threads)
    {
#ifdef _OPENMP
        const int tid = omp_get_thread_num(), threads = omp_get_num_threads();
#else
        const int tid = 0, threads = 1;
#endif
        for (int32_t i = 0; i < count; i++) {
            layer(d, layers + i, keys + i * cache_stride, values + i * cache_stride, p, &barrier, tid, threads);
            /* The rows are this thread's own until the next layer's first barrier. */
            if (p->keep[i] >= 0)
                FOR_MY_ROWS memcpy(p->kept + ((int64_t)p->keep[i] * p->n + r) * d->hidden, p->x + r * d->hidden,
                                   d->hidden * sizeof(float));
        }
    }
}

#define ALONE (1 << 18) /* multiplications that one thread ends before a second one is awake */

/* y[n, out] = W x for x [n, in] in fp32; q, q_scale, q_sum as in Pass. */
void dspark_linear(const Linear *w, const float *x, int32_t n, float *y, int8_t *q, float *q_scale,
                   float *q_sum, int32_t threads_wanted) {
    const int64_t nb = w->in / BLOCK;
    Barrier barrier = {0, 0};
    if ((int64_t)n * w->out * w->in < ALONE) threads_wanted = 1;
#pragma omp parallel num_threads(threads_wanted) if (threads_wanted > 1)
    {
#ifdef _OPENMP
        const int tid = omp_get_thread_num(), threads = omp_get_num_threads();
#else
        const int tid = 0, threads = 1;
#endif
        for (int64_t r = (int64_t)n * tid / threads; r < (int64_t)n * (tid + 1) / threads; r++)
            quantise_row(x + r * w->in, w->in, q + r * w->in, q_scale + r * nb, q_sum + r * nb);
        meet(&barrier, threads);
        product(w, n, q, q_scale, q_sum, y, w->out, 0, tid, threads);
        meet(&barrier, threads);
    }
}

/* out[n, hidden] = RMSNorm(x) * weight, row by row. */
void dspark_rms_norm(const float *x, const float *weight, int32_t n, int32_t hidden, float eps, float *out) {
    for (int64_t r = 0; r < n; r++)
        scale_by_norm((float *)x + r * hidden, weight, hidden, eps, out + r * hidden);
}

int32_t dspark_is_fast(void) { return FAST; }
