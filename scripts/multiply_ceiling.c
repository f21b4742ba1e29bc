/* How many 8-bit multiply-adds a core can do at best, in the two forms of the int8 kernels (AVX2, no VNNI).
 *
 *     gcc -O3 -march=native scripts/multiply_ceiling.c -o /tmp/ceiling && /tmp/ceiling
 *
 * 8-bit weights need vpmaddubsw, vpmaddwd and an addition for 32 products; 4-bit weights add eight results
 * in 16 bits before they widen, so nearly all of the work is vpmaddubsw. Registers only, no memory.
 */
#include <immintrin.h>
#include <stdio.h>
#include <time.h>

#define ROUNDS 50000000L
#define CHAINS 8
#define HOLD(x) __asm__ volatile("" : "+x"(x))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(void) {
    __m256i u = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1), sum[CHAINS];
    for (int j = 0; j < CHAINS; j++) sum[j] = _mm256_setzero_si256();
    double start = now();
    for (long i = 0; i < ROUNDS; i++)
        for (int j = 0; j < CHAINS; j++) {
            __m256i t = _mm256_maddubs_epi16(u, sum[j]);
            HOLD(t);
            sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(t, ones));
            HOLD(sum[j]);
        }
    printf("8-bit weights: %.1f billion multiply-adds a second\n", ROUNDS * CHAINS * 32 / (now() - start) * 1e-9);
    start = now();
    for (long i = 0; i < ROUNDS; i++)
        for (int j = 0; j < CHAINS; j++) {
            __m256i t = _mm256_maddubs_epi16(u, ones);
            HOLD(t);
            sum[j] = _mm256_add_epi16(sum[j], t);
            HOLD(sum[j]);
        }
    printf("4-bit weights: %.1f billion multiply-adds a second\n", ROUNDS * CHAINS * 32 / (now() - start) * 1e-9);
    return 0;
}
