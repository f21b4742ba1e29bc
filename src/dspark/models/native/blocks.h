/* Matrices in blocks of 32 columns: packing, 8-bit activations, and their product.
 *
 * Layout of a packed matrix [O, I].  Tiles of 8 outputs; in a tile one record per block of 32 columns:
 *   8 bits: 8 vectors j of 32 bytes, byte 4c+i = w[output c][column 4j+i], then 8 fp16 scales
 *   4 bits: 4 vectors j of 32 bytes, byte 4c+i = low nibble column 4j+i, high nibble column 16+4j+i,
 *           then 8 fp16 scales, then 8 fp16 minima                       w = scale * value + minimum
 *
 * Every operation below handles a row alone and in one fixed order; kernels.c says why that matters.
 */
#ifndef DSPARK_BLOCKS_H
#define DSPARK_BLOCKS_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(DSPARK_GENERIC)
#include <immintrin.h>
#define FAST 1
#else
#define FAST 0
#endif

#define BLOCK 32
#define TILE 8
#define ROWS 4 /* rows that share one reading of the weights from the cache */

typedef struct {
    const uint8_t *data; /* packed, see above */
    const float *bias;   /* [out] or NULL */
    int32_t out, in, bits, pad;
} Linear;

static int64_t record_bytes(int bits) { return bits == 8 ? 256 + 16 : 128 + 32; }

/* ---- fp16 <-> fp32, for scales -------------------------------------------------------------- */

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, frac = h & 1023, bits;
    if (exp == 31) bits = sign | 0x7f800000u | (frac << 13);
    else if (exp) bits = sign | ((exp + 112) << 23) | (frac << 13);
    else { /* subnormal: exact in fp32 */
        float f = (float)frac * 5.9604644775390625e-8f;
        return sign ? -f : f;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* ---- packing -------------------------------------------------------------------------------- */

/* values [out, in] one byte each; scale, minimum [out, in / 32] fp16 bits; minimum NULL for 8 bits.
 * `out` need not be a multiple of 8: the tail of the last tile is zero. */
void dspark_pack(const uint8_t *values, const uint16_t *scale, const uint16_t *minimum, int32_t out,
                 int32_t in, int32_t bits, uint8_t *data) {
    const int64_t rec = record_bytes(bits), nb = in / BLOCK;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < (out + TILE - 1) / TILE; t++)
        for (int64_t b = 0; b < nb; b++) {
            uint8_t *r = data + (t * nb + b) * rec;
            memset(r, 0, rec);
            for (int c = 0; c < TILE && t * TILE + c < out; c++) {
                const int64_t o = t * TILE + c;
                const uint8_t *v = values + o * in + b * BLOCK;
                for (int j = 0; j < (bits == 8 ? 8 : 4); j++)
                    for (int i = 0; i < 4; i++)
                        r[j * 32 + c * 4 + i] =
                            bits == 8 ? v[4 * j + i] : v[4 * j + i] | (v[16 + 4 * j + i] << 4);
                uint16_t *s = (uint16_t *)(r + (bits == 8 ? 256 : 128));
                s[c] = scale[o * nb + b];
                if (bits == 4) s[8 + c] = minimum[o * nb + b];
            }
        }
}

/* Row `o` of a packed matrix as floats: the embedding of a model whose head is tied to it. */
static void unpack_row(const Linear *w, int64_t o, float *out) {
    const int64_t rec = record_bytes(w->bits), nb = w->in / BLOCK;
    const int c = o % TILE;
    for (int64_t b = 0; b < nb; b++) {
        const uint8_t *r = w->data + (o / TILE * nb + b) * rec;
        const uint16_t *s = (const uint16_t *)(r + (w->bits == 8 ? 256 : 128));
        const float d = half_to_float(s[c]), m = w->bits == 4 ? half_to_float(s[8 + c]) : 0.0f;
        for (int k = 0; k < BLOCK; k++) {
            const uint8_t byte = r[(w->bits == 8 ? k / 4 : k % 16 / 4) * 32 + c * 4 + k % 4];
            const float v = w->bits == 8 ? (float)(int8_t)byte : (float)(k < 16 ? byte & 15 : byte >> 4);
            out[b * BLOCK + k] = fmaf(d, v, m);
        }
    }
}

void dspark_rows(const Linear *w, const int64_t *ids, int32_t n, float *out) {
    for (int32_t i = 0; i < n; i++) unpack_row(w, ids[i], out + (int64_t)i * w->in);
}

/* ---- small mathematics, the same bits in every lane ----------------------------------------- */

/* exp(x) for x <= 88: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 1e-7 * 3. */
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float magic = 12582912.0f, shifted = fmaf(x, 1.44269504f, magic), n = shifted - magic;
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.98412698e-4f;
    p = fmaf(p, r, 1.38888889e-3f);
    p = fmaf(p, r, 8.33333333e-3f);
    p = fmaf(p, r, 4.16666667e-2f);
    p = fmaf(p, r, 1.66666667e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    union { float f; int32_t i; } two;
    two.i = ((int32_t)n + 127) << 23;
    return p * two.f;
}

static void exp_in_place(float *x, int64_t n, float shift) {
    for (int64_t i = 0; i < n; i++) x[i] = exp_(x[i] - shift);
}

static float sum8(const float *lane) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static float inverse_rms(const float *x, int64_t n, float eps) {
    float lane[8] = {0};
    for (int64_t i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++) lane[j] = fmaf(x[i + j], x[i + j], lane[j]);
    return 1.0f / sqrtf(sum8(lane) / (float)n + eps);
}

/* One row of activations to 8 bits per block of 32: x ~ scale * q, sum = scale * (sum of q). */
static void quantise_row(const float *x, int64_t n, int8_t *q, float *scale, float *sum) {
    for (int64_t b = 0; b < n / BLOCK; b++, x += BLOCK, q += BLOCK) {
        float lane[8] = {0}, top = 0.0f;
        for (int i = 0; i < BLOCK; i += 8)
            for (int j = 0; j < 8; j++) {
                const float a = fabsf(x[i + j]);
                lane[j] = a > lane[j] ? a : lane[j];
            }
        for (int j = 0; j < 8; j++) top = lane[j] > top ? lane[j] : top;
        const float inv = top > 0.0f ? 127.0f / top : 0.0f;
        int32_t total = 0;
        for (int i = 0; i < BLOCK; i++) {
            const int32_t v = (int32_t)((x[i] * inv + 12582912.0f) - 12582912.0f); /* to nearest even */
            q[i] = (int8_t)v;
            total += v;
        }
        scale[b] = top / 127.0f;
        sum[b] = scale[b] * (float)total;
    }
}

/* ---- matrix product -------------------------------------------------------------------------- */

#if FAST
#if (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define DOT4(acc, u, s) _mm256_dpbusd_epi32(acc, u, s)
#define VNNI 1
#elif defined(__AVXVNNI__)
#define DOT4(acc, u, s) _mm256_dpbusd_avx_epi32(acc, u, s)
#define VNNI 1
#else
/* |u * s| pairs stay below 2 * 127 * 127 < 2^15: the 16-bit sum cannot saturate. */
#define DOT4(acc, u, s) \
    _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)))
#define VNNI 0
#endif

/* Compilers like to sum products in another order and spill them; this holds the sum in its place. */
#define KEEP(acc) __asm__ volatile("" : "+x"(acc))

static inline __m256i four(const int8_t *q) {
    int32_t v;
    memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

/* One tile of 8 outputs for R rows. Every lane is one output of one row; nothing crosses lanes. */
#define TILE_KERNEL(R)                                                                              \
    static inline void tile_##R(const uint8_t *r, int bits, int64_t nb, const int8_t *q, int64_t ldq, \
                                const float *scale, const float *sum, int64_t lds, __m256 *acc) {   \
        const __m256i low = _mm256_set1_epi8(15);                                                   \
        for (int i = 0; i < R; i++) acc[i] = _mm256_setzero_ps();                                   \
        if (bits == 8)                                                                              \
            for (int64_t b = 0; b < nb; b++, r += 272, q += BLOCK) {                                \
                __m256i dot[R];                                                                     \
                for (int i = 0; i < R; i++) dot[i] = _mm256_setzero_si256();                        \
                for (int j = 0; j < 8; j++) {                                                       \
                    const __m256i w = _mm256_loadu_si256((const __m256i *)(r + 32 * j));            \
                    const __m256i u = _mm256_abs_epi8(w);                                           \
                    for (int i = 0; i < R; i++) {                                                   \
                        dot[i] = DOT4(dot[i], u, _mm256_sign_epi8(four(q + i * ldq + 4 * j), w));   \
                        KEEP(dot[i]);                                                               \
                    }                                                                               \
                }                                                                                   \
                const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(r + 256)));      \
                for (int i = 0; i < R; i++)                                                         \
                    acc[i] = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(scale[i * lds + b])),  \
                                             _mm256_cvtepi32_ps(dot[i]), acc[i]);                   \
            }                                                                                       \
        else                                                                                        \
            for (int64_t b = 0; b < nb; b++, r += 160, q += BLOCK) {                                \
                __m256i dot[R];                                                                     \
                for (int i = 0; i < R; i++) dot[i] = _mm256_setzero_si256();                        \
                for (int j = 0; j < 4; j++) {                                                       \
                    const __m256i w = _mm256_loadu_si256((const __m256i *)(r + 32 * j));            \
                    const __m256i lo = _mm256_and_si256(w, low);                                    \
                    const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);              \
                    for (int i = 0; i < R; i++) {                                                   \
                        ADD4(dot[i], lo, four(q + i * ldq + 4 * j));                                \
                        ADD4(dot[i], hi, four(q + i * ldq + 16 + 4 * j));                           \
                    }                                                                               \
                }                                                                                   \
                const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(r + 128)));      \
                const __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(r + 144)));      \
                for (int i = 0; i < R; i++) {                                                       \
                    acc[i] = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_set1_ps(scale[i * lds + b])),  \
                                             _mm256_cvtepi32_ps(WIDE(dot[i])), acc[i]);             \
                    acc[i] = _mm256_fmadd_ps(m, _mm256_set1_ps(sum[i * lds + b]), acc[i]);          \
                }                                                                                   \
            }                                                                                       \
    }
#if VNNI
#define ADD4(acc, u, s) acc = DOT4(acc, u, s); KEEP(acc)
#define WIDE(acc) acc
#else
/* 4-bit weights: eight products of at most 2 * 15 * 127 fit 16 bits, so widening waits for the block. */
#define ADD4(acc, u, s) acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(u, s)); KEEP(acc)
#define WIDE(acc) _mm256_madd_epi16(acc, _mm256_set1_epi16(1))
#endif
TILE_KERNEL(1)
TILE_KERNEL(2)
TILE_KERNEL(3)
TILE_KERNEL(4)
#endif

static void tile(const Linear *w, int64_t t, const int8_t *q, const float *scale, const float *sum,
                 int rows, float out[ROWS][TILE]) {
    const int64_t nb = w->in / BLOCK;
    const uint8_t *r = w->data + t * nb * record_bytes(w->bits);
#if FAST
    __m256 acc[ROWS];
    switch (rows) {
    case 1: tile_1(r, w->bits, nb, q, w->in, scale, sum, nb, acc); break;
    case 2: tile_2(r, w->bits, nb, q, w->in, scale, sum, nb, acc); break;
    case 3: tile_3(r, w->bits, nb, q, w->in, scale, sum, nb, acc); break;
    default: tile_4(r, w->bits, nb, q, w->in, scale, sum, nb, acc);
    }
    for (int i = 0; i < rows; i++) _mm256_storeu_ps(out[i], acc[i]);
#else
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < TILE; c++) {
            float acc = 0.0f;
            for (int64_t b = 0; b < nb; b++) {
                const uint8_t *rec = r + b * record_bytes(w->bits);
                const uint16_t *s = (const uint16_t *)(rec + (w->bits == 8 ? 256 : 128));
                const int8_t *a = q + i * w->in + b * BLOCK;
                int32_t dot = 0;
                if (w->bits == 8)
                    for (int k = 0; k < BLOCK; k++)
                        dot += (int32_t)(int8_t)rec[k / 4 * 32 + c * 4 + k % 4] * a[k];
                else
                    for (int k = 0; k < 16; k++) {
                        const uint8_t byte = rec[k / 4 * 32 + c * 4 + k % 4];
                        dot += (byte & 15) * a[k] + (byte >> 4) * a[16 + k];
                    }
                acc = fmaf(half_to_float(s[c]) * scale[i * nb + b], (float)dot, acc);
                if (w->bits == 4) acc = fmaf(half_to_float(s[8 + c]), sum[i * nb + b], acc);
            }
            out[i][c] = acc;
        }
#endif
}

/* y[n, out] (= or +=) W x for the tiles of thread `tid`; x is quantised in p->q. */
static void product(const Linear *w, int32_t n, const int8_t *q, const float *scale, const float *sum,
                    float *y, int64_t ldy, int add, int tid, int threads) {
    const int64_t tiles = (w->out + TILE - 1) / TILE, nb = w->in / BLOCK;
    const int64_t first = tiles * tid / threads, last = tiles * (tid + 1) / threads;
    float out[ROWS][TILE];
    for (int64_t t = first; t < last; t++)
        for (int32_t i = 0; i < n; i += ROWS) {
            const int rows = n - i < ROWS ? n - i : ROWS;
            tile(w, t, q + (int64_t)i * w->in, scale + i * nb, sum + i * nb, rows, out);
            const int cols = w->out - t * TILE < TILE ? (int)(w->out - t * TILE) : TILE;
            for (int r = 0; r < rows; r++) {
                float *dst = y + (i + r) * ldy + t * TILE;
                for (int c = 0; c < cols; c++) {
                    const float v = w->bias ? out[r][c] + w->bias[t * TILE + c] : out[r][c];
                    dst[c] = add ? dst[c] + v : v;
                }
            }
        }
}

#endif
