/* Eight and four numbers at a time; included by glue.c.
 *
 * Every function here does the same operations in the same order for a row whatever rows are beside
 * it, and never sums across rows. Lanes are fused multiply-adds where the processor has them.
 */
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int32_t i4 __attribute__((vector_size(16)));

static inline v8 load8(const float *p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline v4 load4(const float *p) {
    v4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store8(float *p, v8 v) { memcpy(p, &v, sizeof v); }
static inline void store4(float *p, v4 v) { memcpy(p, &v, sizeof v); }
static inline v8 all8(float x) { return (v8){x, x, x, x, x, x, x, x}; }
static inline v4 all4(float x) { return (v4){x, x, x, x}; }

/* Lane by lane: a where `where` has all bits, b where it has none. */
static inline v8 pick8(i8 where, v8 a, v8 b) { return (v8)((where & (i8)a) | (~where & (i8)b)); }
static inline v4 pick4(i4 where, v4 a, v4 b) { return (v4)((where & (i4)a) | (~where & (i4)b)); }
static inline v8 max8(v8 a, v8 b) { return pick8(a > b, a, b); }
static inline v4 max4(v4 a, v4 b) { return pick4(a > b, a, b); }

#ifdef __FMA__
#include <immintrin.h>
static inline v8 fma8(v8 a, v8 b, v8 c) { return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline v4 fma4(v4 a, v4 b, v4 c) { return (v4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
#else
static inline v8 fma8(v8 a, v8 b, v8 c) { return a * b + c; }
static inline v4 fma4(v4 a, v4 b, v4 c) { return a * b + c; }
#endif

static inline float sum8(v8 s) { return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7])); }

static float dot(const float *a, const float *b, int64_t n) {
    v8 s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        s0 = fma8(load8(a + i), load8(b + i), s0);
        s1 = fma8(load8(a + i + 8), load8(b + i + 8), s1);
        s2 = fma8(load8(a + i + 16), load8(b + i + 16), s2);
        s3 = fma8(load8(a + i + 24), load8(b + i + 24), s3);
    }
    for (; i + 8 <= n; i += 8) s0 = fma8(load8(a + i), load8(b + i), s0);
    float total = sum8((s0 + s1) + (s2 + s3));
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

/* y[0 .. rows) = matrix [rows, n] times x: four rows of the matrix share what is read of x. */
static void dots(const float *matrix, int64_t rows, const float *x, int64_t n, float *y) {
    int64_t j = 0;
    for (; j + 4 <= rows && n >= 8; j += 4) {
        const float *a = matrix + j * n, *b = a + n, *c = b + n, *d = c + n;
        v8 s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) {
            const v8 v = load8(x + i);
            s0 = fma8(load8(a + i), v, s0);
            s1 = fma8(load8(b + i), v, s1);
            s2 = fma8(load8(c + i), v, s2);
            s3 = fma8(load8(d + i), v, s3);
        }
        y[j] = sum8(s0), y[j + 1] = sum8(s1), y[j + 2] = sum8(s2), y[j + 3] = sum8(s3);
        for (; i < n; i++)
            y[j] += a[i] * x[i], y[j + 1] += b[i] * x[i], y[j + 2] += c[i] * x[i], y[j + 3] += d[i] * x[i];
    }
    for (; j < rows; j++) y[j] = dot(matrix + j * n, x, n);
}

/* e^x within two units of the last place; below -87 it stays at e^-87, which is nothing beside 1. */
static inline v8 exp8(v8 x) {
    x = max8(x, all8(-87.0f));
    x = pick8(x < 88.0f, x, all8(88.0f));
    /* Adding 1.5 * 2^23 rounds to a whole number, which then stands in the last bits. */
    const v8 magic = all8(12582912.0f), shifted = fma8(x, all8(1.44269504f), magic), n = shifted - magic;
    v8 r = fma8(n, all8(-0.693359375f), x);
    r = fma8(n, all8(2.12194440e-4f), r);
    v8 p = all8(1.0f / 5040);
    p = fma8(p, r, all8(1.0f / 720));
    p = fma8(p, r, all8(1.0f / 120));
    p = fma8(p, r, all8(1.0f / 24));
    p = fma8(p, r, all8(1.0f / 6));
    p = fma8(p, r, all8(0.5f));
    p = fma8(p, r, all8(1.0f));
    p = fma8(p, r, all8(1.0f));
    const i8 bits = ((i8)shifted - (i8)magic + 127) << 23;
    return p * (v8)bits;
}

/* log(1 + u) for u >= 0: a logarithm of the rounded sum, times what the rounding took from u. */
static inline v8 log1p8(v8 u) {
    const v8 one = all8(1.0f), w = one + u;
    const i8 bits = (i8)w, e = (bits - 0x3f3504f3) >> 23; /* mantissa in sqrt(1/2) .. sqrt(2) */
    const v8 f = (v8)(bits - (e << 23)) - one, n = __builtin_convertvector(e, v8);
    /* log(1 + f) = 2 artanh(s), s = f / (2 + f) */
    const v8 s = f / (f + 2.0f), z = s * s;
    v8 p = all8(2.0f / 9);
    p = fma8(p, z, all8(2.0f / 7));
    p = fma8(p, z, all8(2.0f / 5));
    p = fma8(p, z, all8(2.0f / 3));
    p = fma8(p, z, all8(2.0f));
    const v8 log = fma8(n, all8(0.693147181f), s * p), rest = w - one;
    return pick8(rest == 0, u, log * (u / rest));
}

static inline v8 sigmoid8(v8 x) { return all8(1.0f) / (all8(1.0f) + exp8(-x)); }

/* x[0 .. n) through f, eight at a time. */
#define MAP8(x, n, expression)                              \
    for (int64_t i_ = 0; i_ < (n); i_ += 8) {               \
        float t_[8] = {0};                                  \
        const int64_t m_ = (n) - i_ < 8 ? (n) - i_ : 8;     \
        memcpy(t_, (x) + i_, m_ * sizeof(float));           \
        const v8 it = load8(t_);                            \
        store8(t_, (expression));                           \
        memcpy((x) + i_, t_, m_ * sizeof(float));           \
    }

/* ---- four heads that read the same keys ---------------------------------------------------------- */

/* Queries of heads 0 .. count - 1 (at most four), [count, dim], side by side: [dim, 4]. */
static void quad(const float *q, int64_t count, int64_t dim, float *out) {
    if (count < 4) memset(out, 0, 4 * dim * sizeof *out);
    for (int64_t h = 0; h < count; h++)
        for (int64_t e = 0; e < dim; e++) out[4 * e + h] = q[h * dim + e];
}

/* score [count, 4]: four heads' products with every key, each over the dimensions in order. */
static void quad_scores(const float *q, const float *const *key, int64_t count, int64_t dim, float *score) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        v4 s[8] = {{0}};
        for (int64_t e = 0; e < dim; e++) {
            const v4 v = load4(q + 4 * e);
            for (int k = 0; k < 8; k++) s[k] = fma4(all4(key[i + k][e]), v, s[k]);
        }
        for (int k = 0; k < 8; k++) store4(score + 4 * (i + k), s[k]);
    }
    for (; i < count; i++) {
        v4 s = {0};
        for (int64_t e = 0; e < dim; e++) s = fma4(all4(key[i][e]), load4(q + 4 * e), s);
        store4(score + 4 * i, s);
    }
}

/* out [4, dim] = sum over keys, in order, of weight [count, 4] times key. */
static void quad_values(const float *weight, const float *const *key, int64_t count, int64_t dim, float *out) {
    int64_t e = 0;
    for (; e + 16 <= dim; e += 16) {
        v8 a[4] = {{0}}, b[4] = {{0}};
        for (int64_t i = 0; i < count; i++) {
            const v8 low = load8(key[i] + e), high = load8(key[i] + e + 8);
            for (int h = 0; h < 4; h++) {
                const v8 w = all8(weight[4 * i + h]);
                a[h] = fma8(w, low, a[h]);
                b[h] = fma8(w, high, b[h]);
            }
        }
        for (int h = 0; h < 4; h++) store8(out + h * dim + e, a[h]), store8(out + h * dim + e + 8, b[h]);
    }
    for (; e < dim; e++)
        for (int h = 0; h < 4; h++) {
            float total = 0;
            for (int64_t i = 0; i < count; i++) total += weight[4 * i + h] * key[i][e];
            out[h * dim + e] = total;
        }
}
