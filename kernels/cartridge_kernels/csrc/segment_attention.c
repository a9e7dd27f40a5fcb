/* Attention over segments and live tokens on one AVX2 core: float32 sums, any storage, no torch.
 *
 * Owns the arithmetic. Refuses to check anything: native.py has checked every pointer, stride,
 * page id and length before it calls. Each part (a segment, or one request's live tokens) is read
 * once, in tiles that become float32 in L1/L2, for all query rows that see it; its softmax sums are
 * then joined to those of the rows' earlier parts. Scores are to base 2.
 *
 * Source: online softmax, Milakov and Gimelshein, arXiv 1805.02867, section 3.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16, E4M3 };
enum { NO_SCALE, BY_HEAD, BY_CHANNEL, BY_PAGE };
enum { TILE = 128, ROWS = 96, PANEL = 16 };
/* Lines of a panel lie in different sets of the cache. */
enum { KEY_ROW = TILE + PANEL };
#define E4M3_FACTOR 256.0f /* what an e4m3 code at the place of a float16 is too small by: 2^(15-7) */
#define INLINE static inline __attribute__((always_inline))

/* Strides are in bytes. */
typedef struct {
  const char *data;
  int64_t page_stride, head_stride, row_stride, column_stride, page_rows, dtype;
} Storage;

/* Row i of a part is query row rows[i / group], head i % group of the group; with `is_causal` it
 * sees the first `first_seen` + i / group + 1 tokens, else all. */
typedef struct {
  int64_t keys, values; /* indexes of storages */
  const int64_t *key_pages, *value_pages, *rows;
  int64_t first_key, first_value, num_tokens, num_rows, is_causal, first_seen;
  const float *scale;
  int64_t scale_kind;
} Part;

INLINE __m256 load8(const char *from, int dtype) {
  if (dtype == FLOAT32) return _mm256_loadu_ps((const float *)from);
  if (dtype == E4M3) {
    /* Sign extended, so bit 14 is cleared; float16's own subnormals take in e4m3's. */
    __m128i code = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16((short)0xBF80)));
  }
  __m128i half = _mm_loadu_si128((const __m128i *)from);
  if (dtype == FLOAT16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype == E4M3 ? 1 : 2; }

INLINE float load1(const char *from, int dtype) {
  char one[32] = {0};
  memcpy(one, from, size_of(dtype));
  return _mm256_cvtss_f32(load8(one, dtype));
}

/* `count` numbers, `stride` bytes apart, to float32. */
INLINE void convert(float *to, const char *from, int64_t count, int64_t stride, int dtype) {
  int64_t size = size_of(dtype), i = 0;
  if (stride == size)
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load8(from + i * size, dtype));
  for (; i < count; i++) to[i] = load1(from + i * stride, dtype);
}

/* Eight rows of eight numbers, `stride` bytes apart, to eight columns. */
INLINE void transpose8(float *to, const char *from, int64_t stride, int dtype) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = load8(from + i * stride, dtype);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * KEY_ROW, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * KEY_ROW, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

/* c[rows][16] = (or +=) a[rows][depth] b[depth][16]; `rows` is a constant where it is called. */
INLINE void product_of(int rows, const float *a, int64_t a_row, const float *b, int64_t b_row,
                       float *c, int64_t c_row, int64_t depth, int is_sum) {
  __m256 low[6], high[6];
  for (int i = 0; i < rows; i++) {
    low[i] = is_sum ? _mm256_loadu_ps(c + i * c_row) : _mm256_setzero_ps();
    high[i] = is_sum ? _mm256_loadu_ps(c + i * c_row + 8) : _mm256_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k++) {
    __m256 b_low = _mm256_loadu_ps(b + k * b_row), b_high = _mm256_loadu_ps(b + k * b_row + 8);
    for (int i = 0; i < rows; i++) {
      __m256 left = _mm256_broadcast_ss(a + i * a_row + k);
      low[i] = _mm256_fmadd_ps(left, b_low, low[i]);
      high[i] = _mm256_fmadd_ps(left, b_high, high[i]);
    }
  }
  for (int i = 0; i < rows; i++) {
    _mm256_storeu_ps(c + i * c_row, low[i]);
    _mm256_storeu_ps(c + i * c_row + 8, high[i]);
  }
}

/* c[rows][columns] = (or +=) a b; `columns` is a multiple of 16. */
static void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                    const float *b, int64_t b_row, float *c, int64_t c_row, int is_sum) {
  for (int64_t column = 0; column < columns; column += PANEL)
    for (int64_t row = 0; row < rows; row += 6) {
      const float *left = a + row * a_row, *right = b + column;
      float *to = c + row * c_row + column;
#define CASE(n) case n: product_of(n, left, a_row, right, b_row, to, c_row, depth, is_sum); break
      switch (rows - row) {
        CASE(1); CASE(2); CASE(3); CASE(4); CASE(5);
        default: product_of(6, left, a_row, right, b_row, to, c_row, depth, is_sum);
      }
    }
}

/* 2^x for x <= 0; 0 below -126. */
INLINE __m256 exp2_of(__m256 x) {
  static const float taylor[] = {1.52527338e-5f, 1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f,
                                 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f};
  __m256 is_zero = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  x = _mm256_max_ps(x, _mm256_set1_ps(-126.0f));
  __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 part = _mm256_sub_ps(x, whole), sum = _mm256_set1_ps(taylor[0]);
  for (int i = 1; i < 8; i++) sum = _mm256_fmadd_ps(sum, part, _mm256_set1_ps(taylor[i]));
  __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  sum = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), power));
  return _mm256_andnot_ps(is_zero, sum);
}

static float exp2_one(float x) { /* minus infinity included */
  return x < -126.0f ? 0.0f : exp2f(x);
}

/* One row of a tile: scores become weights relative to the row's maximum so far. */
static void soften(float *scores, int64_t seen, int64_t width, float *largest, float *total,
                   float *output, int64_t value_width) {
  for (int64_t i = seen; i < width; i++) scores[i] = -INFINITY;
  if (seen == 0) {
    memset(scores, 0, width * sizeof(float));
    return;
  }
  __m256 most = _mm256_set1_ps(*largest);
  for (int64_t i = 0; i < width; i += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + i));
  float lanes[8], base = -INFINITY;
  _mm256_storeu_ps(lanes, most);
  for (int i = 0; i < 8; i++) base = lanes[i] > base ? lanes[i] : base;
  if (base > *largest) {
    float shrink = exp2_one(*largest - base);
    *largest = base;
    *total *= shrink;
    for (int64_t i = 0; i < value_width; i++) output[i] *= shrink;
  }
  __m256 sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < width; i += 8) {
    __m256 weight = exp2_of(_mm256_sub_ps(_mm256_loadu_ps(scores + i), _mm256_set1_ps(base)));
    _mm256_storeu_ps(scores + i, weight);
    sum = _mm256_add_ps(sum, weight);
  }
  _mm256_storeu_ps(lanes, sum);
  for (int i = 0; i < 8; i++) *total += lanes[i];
}

/* Rows that lie in one page, `from` on, as columns: to[dim][KEY_ROW]. */
INLINE void columns_as(float *to, const char *from, const Storage *s, int64_t rows, int64_t dim,
                       int dtype) {
  int64_t size = size_of(dtype), row = 0;
  if (s->row_stride == size) { /* they lie as columns already */
    for (int64_t d = 0; d < dim; d++)
      convert(to + d * KEY_ROW, from + d * s->column_stride, rows, size, dtype);
    return;
  }
  if (s->column_stride == size && dim % 8 == 0)
    for (; row + 8 <= rows; row += 8)
      for (int64_t d = 0; d < dim; d += 8)
        transpose8(to + d * KEY_ROW + row, from + row * s->row_stride + d * size, s->row_stride,
                   dtype);
  for (; row < rows; row++)
    for (int64_t d = 0; d < dim; d++)
      to[d * KEY_ROW + row] = load1(from + row * s->row_stride + d * s->column_stride, dtype);
}

/* The same as rows: to[rows][width]. */
INLINE void rows_as(float *to, const char *from, const Storage *s, int64_t rows, int64_t dim,
                    int64_t width, int dtype) {
  for (int64_t row = 0; row < rows; row++)
    convert(to + row * width, from + row * s->row_stride, dim, s->column_stride, dtype);
}

/* Rows [first, first + count) of a head, page by page; as columns where `width` is 0. */
static void load(float *to, const Storage *s, const int64_t *pages, int64_t head, int64_t first,
                 int64_t count, int64_t dim, int64_t width) {
  for (int64_t done = 0, run; done < count; done += run) {
    int64_t page = (first + done) / s->page_rows, row = (first + done) % s->page_rows;
    const char *from = s->data + pages[page] * s->page_stride + head * s->head_stride +
                       row * s->row_stride;
    run = s->page_rows - row < count - done ? s->page_rows - row : count - done;
#define LOAD(type)                                                    \
  case type:                                                          \
    if (width) rows_as(to + done * width, from, s, run, dim, width, type); \
    else columns_as(to + done, from, s, run, dim, type);              \
    break
    switch (s->dtype) { LOAD(FLOAT32); LOAD(BFLOAT16); LOAD(FLOAT16); LOAD(E4M3); }
  }
}

typedef struct {
  float *queries, *output, *largest, *total, *scores, *keys, *values;
} Work;

/* One part for one KV head: unnormalised sums of its rows into `work`. */
static void attend_part(const Part *part, const Storage *ks, const Storage *vs, const Work *work,
                        int64_t head, int64_t heads, int64_t group, int64_t dim, int64_t value_dim,
                        int64_t value_width) {
  int64_t rows = part->num_rows * group;
  for (int64_t first = 0; first < part->num_tokens; first += TILE) {
    int64_t count = part->num_tokens - first < TILE ? part->num_tokens - first : TILE;
    int64_t width = (count + PANEL - 1) / PANEL * PANEL;
    load(work->keys, ks, part->key_pages, head, part->first_key + first, count, dim, 0);
    load(work->values, vs, part->value_pages, head, part->first_value + first, count, value_dim,
         value_width + PANEL);
    for (int64_t row = 0; row < rows; row += ROWS) {
      int64_t some = rows - row < ROWS ? rows - row : ROWS;
      /* The last row sees most. */
      if (part->is_causal && part->first_seen + (row + some - 1) / group + 1 <= first) continue;
      product(some, width, dim, work->queries + row * dim, dim, work->keys, KEY_ROW, work->scores,
              TILE, 0);
      for (int64_t i = row; i < row + some; i++) {
        float *scores = work->scores + (i - row) * TILE;
        int64_t seen = part->is_causal ? part->first_seen + i / group + 1 - first : count;
        soften(scores, seen < 0 ? 0 : seen < count ? seen : count, width, work->largest + i,
               work->total + i, work->output + i * value_width, value_width);
        if (part->scale_kind == BY_PAGE)
          for (int64_t t = 0; t < count; t++)
            scores[t] *=
                part->scale[(part->first_value + first + t) / vs->page_rows * heads + head];
      }
      product(some, value_width, count, work->scores, TILE, work->values, value_width + PANEL,
              work->output + row * value_width, value_width, 1);
    }
  }
}

/* What a sum of a channel lacks: the code's factor and the segment's scale. */
static void scale_of(float *to, const Part *part, int64_t dtype, int64_t head, int64_t value_dim) {
  for (int64_t d = 0; d < value_dim; d++) {
    to[d] = dtype == E4M3 ? E4M3_FACTOR : 1.0f;
    if (part->scale_kind == BY_HEAD) to[d] *= part->scale[head];
    if (part->scale_kind == BY_CHANNEL) to[d] *= part->scale[head * value_dim + d];
  }
}

/* The sums of a part's rows, joined to those of the whole. */
static void join(const Part *part, const Work *work, const float *scale, int64_t head,
                 int64_t num_heads, int64_t group, int64_t value_dim, int64_t value_width,
                 float *output, float *largest, float *total) {
  for (int64_t i = 0; i < part->num_rows * group; i++) {
    if (work->total[i] == 0.0f) continue;
    int64_t place = part->rows[i / group] * num_heads + head * group + i % group;
    float most = work->largest[i] > largest[place] ? work->largest[i] : largest[place];
    float mine = exp2_one(work->largest[i] - most), theirs = exp2_one(largest[place] - most);
    const float *from = work->output + i * value_width;
    float *to = output + place * value_dim;
    for (int64_t d = 0; d < value_dim; d++) to[d] = to[d] * theirs + from[d] * scale[d] * mine;
    total[place] = total[place] * theirs + work->total[i] * mine;
    largest[place] = most;
  }
}

/* Whether this CPU has what the file is compiled for. */
int cartridge_cpu_suits(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

/* Queries [num_rows][num_heads][dim] float32 -> output [..][value_dim], lse (natural); `totals` is
 * room for [num_rows][num_heads]. Returns 0, or 1 where there is no memory. */
int cartridge_attend(const Storage *storages, const Part *parts, int64_t num_parts,
                     const float *queries, int64_t num_rows, int64_t num_heads, int64_t kv_heads,
                     int64_t dim, int64_t value_dim, float scale, float *output, float *lse,
                     float *totals) {
  int64_t group = num_heads / kv_heads, places = num_rows * num_heads, most_rows = 0;
  int64_t value_width = (value_dim + PANEL - 1) / PANEL * PANEL;
  for (int64_t p = 0; p < num_parts; p++)
    if (parts[p].num_rows > most_rows) most_rows = parts[p].num_rows;
  int64_t most = most_rows * group;
  int64_t sizes[] = {most * dim, most * value_width, most, most, ROWS * TILE, dim * KEY_ROW,
                     TILE * (value_width + PANEL), value_dim};
  int64_t needed = 0;
  for (int i = 0; i < 8; i++) needed += (sizes[i] + 15) / 16 * 16;
  float *room = aligned_alloc(64, needed * sizeof(float)), *next = room, *at[8];
  if (!room) return 1;
  for (int i = 0; i < 8; i++) at[i] = next, next += (sizes[i] + 15) / 16 * 16;
  Work work = {at[0], at[1], at[2], at[3], at[4], at[5], at[6]};
  /* Columns after the last number are computed and never read; let them be numbers. */
  memset(work.keys, 0, sizes[5] * sizeof(float));
  memset(work.values, 0, sizes[6] * sizeof(float));
  memset(output, 0, places * value_dim * sizeof(float));
  for (int64_t i = 0; i < places; i++) lse[i] = -INFINITY, totals[i] = 0.0f;

  for (int64_t p = 0; p < num_parts; p++)
    for (int64_t head = 0; head < kv_heads; head++) {
      const Part *part = parts + p;
      int64_t rows = part->num_rows * group;
      for (int64_t i = 0; i < rows; i++) {
        const float *from = queries + (part->rows[i / group] * num_heads + head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d++) work.queries[i * dim + d] = from[d] * scale;
        work.largest[i] = -INFINITY, work.total[i] = 0.0f;
      }
      memset(work.output, 0, rows * value_width * sizeof(float));
      attend_part(part, storages + part->keys, storages + part->values, &work, head, kv_heads,
                  group, dim, value_dim, value_width);
      scale_of(at[7], part, storages[part->values].dtype, head, value_dim);
      join(part, &work, at[7], head, num_heads, group, value_dim, value_width, output, lse, totals);
    }
  for (int64_t i = 0; i < places; i++) {
    if (totals[i] == 0.0f) continue;
    for (int64_t d = 0; d < value_dim; d++) output[i * value_dim + d] /= totals[i];
    lse[i] = (lse[i] + log2f(totals[i])) * 0.693147181f;
  }
  free(room);
  return 0;
}
