/* Attention of one layer in one call; included by glue.c. */

typedef struct {
    const Linear *in, *q, *index_q, *out; /* index_q: NULL without an indexer */
    const Linear *const *groups;          /* the output's first product, block by block */
    Product *product;
    const float *rank_norm, *q_norm, *kv_norm, *sink, *bias, *entry_norm, *index_norm;
    float *keys, *inputs, *index_keys;
    int64_t hidden, rank, heads, dim, num_groups, group_rank, pairs;
    int64_t ratio, span, width, index_heads, index_dim, topk; /* width: channels that are pooled */
    int64_t ring, stride, slot_entries;
    float eps;
} Attention;

typedef struct {
    int64_t n, closing, entries; /* rows; entries that close; entries of the longest sequence */
    const int64_t *slot, *position, *first, *last; /* [n]; a row reads positions first .. last */
    const int64_t *key_rows, *input_rows;          /* [n]: where its key and its inputs go */
    const float *turns;                            /* [n, pairs] */
    const int64_t *pool_rows, *entry_rows, *index_rows; /* [closing, span], [closing], [closing] */
    const float *entry_turns;                      /* [closing, pairs] */
} Rows;

/* Window, closed (and chosen) entries and the sink, then the rotation back. q is scaled already. Four
 * heads at a time read the keys of a row, which are listed once for them. */
static void attend(const Attention *a, const Rows *p, const float *q, const uint8_t *chosen, float *out,
                   int32_t threads) {
    const int64_t dim = a->dim, quads = (a->heads + 3) / 4;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t room = 0;
        float *score = NULL, side[8 * dim], *sums = side + 4 * dim;
        const float **key = NULL;
#pragma omp for collapse(2)
        for (int64_t r = 0; r < p->n; r++)
            for (int64_t f = 0; f < quads; f++) {
                const int64_t closed = a->ratio ? (p->position[r] + 1) / a->ratio : 0;
                const int64_t first = p->first[r], last = p->last[r], head = 4 * f;
                const int64_t heads = a->heads - head < 4 ? a->heads - head : 4;
                const float *slot = a->keys + p->slot[r] * a->stride * dim;
                if (last + 1 - first + closed > room) {
                    room = last + 65 - first + closed;
                    score = realloc(score, 4 * (room + 1) * sizeof *score);
                    key = realloc(key, room * sizeof *key);
                }
                int64_t count = 0;
                for (int64_t i = first, at = first % a->ring; i <= last; i++) {
                    key[count++] = slot + at * dim;
                    if (++at == a->ring) at = 0;
                }
                for (int64_t j = 0; j < closed; j++)
                    if (!chosen || chosen[r * p->entries + j])
                        key[count++] = slot + (a->ring + j) * dim;
                quad(q + (r * a->heads + head) * dim, heads, dim, side);
                quad_scores(side, key, count, dim, score);
                v4 sink = {0}, sum = {0};
                for (int64_t h = 0; h < heads; h++) sink[h] = a->sink[head + h];
                v4 top = sink;
                for (int64_t i = 0; i < count; i++) top = max4(load4(score + 4 * i), top);
                store4(score + 4 * count, sink);
                for (int64_t i = 0; i <= count; i++) store4(score + 4 * i, load4(score + 4 * i) - top);
                MAP8(score, 4 * (count + 1), exp8(it));
                for (int64_t i = 0; i <= count; i++) sum += load4(score + 4 * i);
                quad_values(score, key, count, dim, sums);
                for (int64_t h = 0; h < heads; h++) {
                    float *o = out + (r * a->heads + head + h) * dim;
                    for (int64_t e = 0; e < dim; e++) o[e] = sums[h * dim + e] / sum[h];
                    rotate(o + dim - 2 * a->pairs, p->turns + r * 2 * a->pairs, a->pairs, -1);
                }
            }
        free(score);
        free(key);
    }
}

/* Scores of the indexer [n, entries]: sum over heads of w * relu(q . k), of the closed entries. keys:
 * [slots, entries of a slot, dim]. */
static void index_scores(const Attention *a, const Rows *p, const float *q, const float *w, int64_t w_stride,
                         float *out, int32_t threads) {
    const int64_t heads = a->index_heads, dim = a->index_dim;
    const float scale = 1.0f / sqrtf((float)(heads * dim));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < p->n; r++) {
        const int64_t closed = (p->position[r] + 1) / a->ratio;
        const float *slot = a->index_keys + p->slot[r] * a->slot_entries * dim;
        float side[4 * dim], score[4 * 8], *to = out + r * p->entries;
        memset(to, 0, closed * sizeof *to);
        for (int64_t head = 0; head < heads; head += 4) {
            const int64_t count = heads - head < 4 ? heads - head : 4;
            quad(q + (r * heads + head) * dim, count, dim, side);
            v4 weight = {0};
            for (int64_t h = 0; h < count; h++) weight[h] = w[r * w_stride + head + h] * scale;
            for (int64_t t = 0; t < closed; t += 8) {
                const int64_t some = closed - t < 8 ? closed - t : 8;
                const float *key[8];
                for (int64_t i = 0; i < some; i++) key[i] = slot + (t + i) * dim;
                quad_scores(side, key, some, dim, score);
                for (int64_t i = 0; i < some; i++) {
                    const v4 s = load4(score + 4 * i), each = max4(s, all4(0)) * weight;
                    to[t + i] += (each[0] + each[1]) + (each[2] + each[3]);
                }
            }
        }
    }
}

/* The k-th largest of n > k numbers, whose order is lost. */
static float kth_largest(float *x, int64_t n, int64_t k) {
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        const float pivot = x[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            const float t = x[i];
            x[i++] = x[j], x[j--] = t;
        }
        if (k - 1 <= j)
            hi = j;
        else if (k - 1 >= i)
            lo = i;
        else
            break;
    }
    return x[k - 1];
}

/* The `topk` best entries of each row; of equal ones the first. */
static void choose(const Attention *a, const Rows *p, const float *score, float *scratch, uint8_t *chosen) {
    for (int64_t r = 0; r < p->n; r++) {
        const int64_t closed = (p->position[r] + 1) / a->ratio;
        const float *s = score + r * p->entries;
        uint8_t *c = chosen + r * p->entries;
        memset(c, closed <= a->topk, p->entries);
        if (closed <= a->topk) continue;
        memcpy(scratch, s, closed * sizeof *scratch);
        const float least = kth_largest(scratch, closed, a->topk);
        int64_t room = a->topk;
        for (int64_t t = 0; t < closed; t++) room -= c[t] = s[t] > least;
        for (int64_t t = 0; t < closed && room; t++)
            if (s[t] == least) c[t] = 1, room--;
    }
}

/* Entries pooled channel by channel: inputs [.., 2 * width] (values, gates), rows [n, span]. */
static void pool(const float *inputs, const int64_t *rows, int64_t n, int64_t span, int64_t width,
             const float *bias, float *out, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (n > 1 && threads > 1)
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < width; c++) {
            float top = -INFINITY, sum = 0, total = 0;
            for (int64_t i = 0; i < span; i++)
                top = fmaxf(top, inputs[rows[r * span + i] * 2 * width + width + c] + bias[i * width + c]);
            for (int64_t i = 0; i < span; i++) {
                const float *in = inputs + rows[r * span + i] * 2 * width;
                const float weight = expf(in[width + c] + bias[i * width + c] - top);
                sum += weight;
                total += weight * in[c];
            }
            out[r * width + c] = total / sum;
        }
}

/* Entries normed, rotated to their windows' first positions and put into their rows of a table. */
static void write_entries(const Attention *a, const Rows *p, const float *entry, int64_t dim,
                          const float *norm, const int64_t *rows, float *scratch, float *table) {
    v4_norm_rotate(entry, a->width, p->closing, 1, dim, norm, a->eps, p->entry_turns, a->pairs, scratch, 1);
    for (int64_t c = 0; c < p->closing; c++)
        memcpy(table + rows[c] * dim, scratch + c * dim, dim * sizeof *table);
}

/* x [n, hidden] -> out [n, hidden]; writes keys, inputs and closed entries of the rows. */
void v4_attention(const Attention *a, const Rows *p, const float *x, float *out, int32_t wanted) {
    const int64_t n = p->n, dim = a->dim, all = a->heads * dim, index = a->index_heads * a->index_dim;
    const int64_t f_width = a->in->out, per = all / a->num_groups, ranks = a->num_groups * a->group_rank;
    const int32_t threads = n > 8 ? wanted : 1;
    int64_t wide = a->hidden > a->rank ? a->hidden : a->rank;
    wide = wide > per ? wide : per;
    wide = wide > ranks ? wide : ranks;
    const int64_t sizes[] = {n * f_width, n * a->rank, n * all, n * all, n * dim, n * index,
                             n * p->entries, p->entries, p->closing * a->width, p->closing * a->width,
                             n * per, n * a->group_rank, n * ranks, n * (wide / 32 + 1), n * (wide / 32 + 1)};
    float *part[sizeof sizes / sizeof *sizes];
    int64_t total = 0;
    for (uint64_t i = 0; i < sizeof sizes / sizeof *sizes; i++) total += sizes[i];
    part[0] = malloc(total * sizeof **part);
    for (uint64_t i = 1; i < sizeof sizes / sizeof *sizes; i++) part[i] = part[i - 1] + sizes[i - 1];
    float *f = part[0], *rank = part[1], *q = part[2], *o = part[3], *kv = part[4], *index_q = part[5];
    float *score = part[6], *scratch = part[7], *pooled = part[8], *entry = part[9], *group_in = part[10];
    float *group_out = part[11], *ranked = part[12], *q_scale = part[13], *q_sum = part[14];
    int8_t *quantised = malloc(n * wide);
    uint8_t *chosen = NULL;

    a->product(a->in, x, n, f, quantised, q_scale, q_sum, wanted);
    v4_norm_rotate(f, f_width, n, 1, a->rank, a->rank_norm, a->eps, NULL, 0, rank, threads);
    a->product(a->q, rank, n, q, quantised, q_scale, q_sum, wanted);
    v4_norm_rotate(q, all, n, a->heads, dim, a->q_norm, a->eps, p->turns, a->pairs, q, threads);
    v4_norm_rotate(f + a->rank, f_width, n, 1, dim, a->kv_norm, a->eps, p->turns, a->pairs, kv, threads);
    for (int64_t r = 0; r < n; r++) memcpy(a->keys + p->key_rows[r] * dim, kv + r * dim, dim * sizeof *kv);
    if (a->ratio) {
        const int64_t size = 2 * a->width * (a->span / a->ratio);
        for (int64_t r = 0; r < n; r++)
            memcpy(a->inputs + p->input_rows[r] * size, f + r * f_width + a->rank + dim, size * sizeof *f);
        if (p->closing) {
            pool(a->inputs, p->pool_rows, p->closing, a->span, a->width, a->bias, pooled, threads);
            write_entries(a, p, pooled, dim, a->entry_norm, p->entry_rows, entry, a->keys);
            if (a->index_q)
                write_entries(a, p, pooled + dim, a->index_dim, a->index_norm, p->index_rows, entry,
                              a->index_keys);
        }
        if (a->index_q && p->entries > a->topk) {
            a->product(a->index_q, rank, n, index_q, quantised, q_scale, q_sum, wanted);
            v4_norm_rotate(index_q, index, n, a->index_heads, a->index_dim, NULL, -1, p->turns, a->pairs,
                           index_q, threads);
            index_scores(a, p, index_q, f + a->rank + dim + size, f_width, score, threads);
            chosen = malloc(n * p->entries);
            choose(a, p, score, scratch, chosen);
        }
    }
    attend(a, p, q, chosen, o, threads);
    for (int64_t g = 0; g < a->num_groups; g++) {
        for (int64_t r = 0; r < n; r++) memcpy(group_in + r * per, o + r * all + g * per, per * sizeof *o);
        a->product(a->groups[g], group_in, n, group_out, quantised, q_scale, q_sum, wanted);
        for (int64_t r = 0; r < n; r++)
            memcpy(ranked + r * ranks + g * a->group_rank, group_out + r * a->group_rank,
                   a->group_rank * sizeof *o);
    }
    a->product(a->out, ranked, n, out, quantised, q_scale, q_sum, wanted);
    free(part[0]);
    free(quantised);
    free(chosen);
}
