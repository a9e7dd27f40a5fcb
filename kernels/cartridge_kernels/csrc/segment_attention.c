/* Attention over segments and live tokens on one x86-64 core: float32 sums, any storage, no torch.
 *
 * Compiled once for each instruction set: AVX2, AVX-512, AVX-512 with BF16 products. Those are used
 * only where they lose nothing: keys are bfloat16 and so is every query. They sum in float32.
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
#ifdef __AVX512F__
enum { LANES = 16, BLOCK = 12 };
typedef __m512 Vector;
#define V(name) _mm512_##name
#else
enum { LANES = 8, BLOCK = 6 };
typedef __m256 Vector;
#define V(name) _mm256_##name
#endif
/* A product's sums, BLOCK rows by PANEL columns, fill the registers. */
enum { TILE = 128, ROWS = 48, PANEL = 2 * LANES };
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

#ifdef __AVX512F__
INLINE Vector load_lanes(const char *from, int dtype) {
  if (dtype == FLOAT32) return _mm512_loadu_ps((const float *)from);
  if (dtype == E4M3) {
    __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
    code = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16((short)0xBF80));
    return _mm512_cvtph_ps(code);
  }
  __m256i half = _mm256_loadu_si256((const __m256i *)from);
  if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#else
INLINE Vector load_lanes(const char *from, int dtype) { return load8(from, dtype); }
#endif

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
    for (; i + LANES <= count; i += LANES) V(storeu_ps)(to + i, load_lanes(from + i * size, dtype));
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

#ifdef __AVX512F__
/* 16 rows of 16 numbers of 32 bits to columns. */
INLINE void transpose16(float *to, __m512 *a) {
  __m512 b[16];
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      __m512d left = _mm512_castps_pd(b[i + j]), right = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(left, right));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(left, right));
    }
  /* Lane l of a[4 i + j] is column 4 l + j of rows 4 i to 4 i + 3. */
  for (int j = 0; j < 4; j++) {
    __m512 even = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88);
    __m512 odd = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xDD);
    __m512 more_even = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
    __m512 more_odd = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xDD);
    _mm512_storeu_ps(to + j * KEY_ROW, _mm512_shuffle_f32x4(even, more_even, 0x88));
    _mm512_storeu_ps(to + (j + 8) * KEY_ROW, _mm512_shuffle_f32x4(even, more_even, 0xDD));
    _mm512_storeu_ps(to + (j + 4) * KEY_ROW, _mm512_shuffle_f32x4(odd, more_odd, 0x88));
    _mm512_storeu_ps(to + (j + 12) * KEY_ROW, _mm512_shuffle_f32x4(odd, more_odd, 0xDD));
  }
}
#endif

/* c[rows][PANEL] = (or +=) a[rows][depth] b[depth][PANEL], b of any type and `b_row` bytes from row
 * to row; `rows` and `dtype` are constants where it is called. */
INLINE void product_of(int rows, const float *a, int64_t a_row, const char *b, int64_t b_row,
                       int dtype, float *c, int64_t c_row, int64_t depth, int is_sum) {
  Vector low[BLOCK], high[BLOCK];
  for (int i = 0; i < rows; i++) {
    low[i] = is_sum ? V(loadu_ps)(c + i * c_row) : V(setzero_ps)();
    high[i] = is_sum ? V(loadu_ps)(c + i * c_row + LANES) : V(setzero_ps)();
  }
  for (int64_t k = 0; k < depth; k++) {
    Vector b_low = load_lanes(b + k * b_row, dtype);
    Vector b_high = load_lanes(b + k * b_row + LANES * size_of(dtype), dtype);
    for (int i = 0; i < rows; i++) {
      Vector left = V(set1_ps)(a[i * a_row + k]);
      low[i] = V(fmadd_ps)(left, b_low, low[i]);
      high[i] = V(fmadd_ps)(left, b_high, high[i]);
    }
  }
  for (int i = 0; i < rows; i++) {
    V(storeu_ps)(c + i * c_row, low[i]);
    V(storeu_ps)(c + i * c_row + LANES, high[i]);
  }
}

/* `call(n)` for n = min(left, BLOCK), a constant in each. */
#define CASE(n, call) case n: call(n); break
#if defined(__AVX512F__)
#define FOR_ROWS(left, call)                                                                  \
  switch (left) {                                                                             \
    CASE(1, call); CASE(2, call); CASE(3, call); CASE(4, call); CASE(5, call); CASE(6, call); \
    CASE(7, call); CASE(8, call); CASE(9, call); CASE(10, call); CASE(11, call);              \
    default: call(12);                                                                        \
  }
#else
#define FOR_ROWS(left, call)                                                    \
  switch (left) {                                                               \
    CASE(1, call); CASE(2, call); CASE(3, call); CASE(4, call); CASE(5, call);  \
    default: call(6);                                                           \
  }
#endif

/* c[rows][columns] = (or +=) a b; `columns` is a multiple of PANEL. */
INLINE void product_as(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                       const char *b, int64_t b_row, int dtype, float *c, int64_t c_row,
                       int is_sum) {
  for (int64_t column = 0; column < columns; column += PANEL)
    for (int64_t row = 0; row < rows; row += BLOCK) {
      const float *left = a + row * a_row;
      const char *right = b + column * size_of(dtype);
      float *to = c + row * c_row + column;
#define CALL(n) product_of(n, left, a_row, right, b_row, dtype, to, c_row, depth, is_sum)
      FOR_ROWS(rows - row, CALL)
#undef CALL
    }
}

static void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                    const float *b, int64_t b_row, float *c, int64_t c_row, int is_sum) {
  product_as(rows, columns, depth, a, a_row, (const char *)b, b_row * 4, FLOAT32, c, c_row, is_sum);
}

/* The same, b as it is stored. */
static void product_stored(int64_t rows, int64_t columns, int64_t depth, const float *a,
                           int64_t a_row, const char *b, int64_t b_row, int64_t dtype, float *c,
                           int64_t c_row) {
#define PRODUCT(type) \
  case type: product_as(rows, columns, depth, a, a_row, b, b_row, type, c, c_row, 1); break
  switch (dtype) { PRODUCT(FLOAT32); PRODUCT(BFLOAT16); PRODUCT(FLOAT16); PRODUCT(E4M3); }
}

#ifdef __AVX512BF16__
enum { HAS_PAIRS = 1 };

/* c[rows][PANEL] = factor * a b, both in pairs of bfloat16: two of a row of a, two of a column of
 * b. The products are exact, the sums float32. */
INLINE void product_of_pairs(int rows, const float *a, int64_t a_row, const float *b, float *c,
                             int64_t depth, float factor) {
  Vector low[BLOCK], high[BLOCK];
  for (int i = 0; i < rows; i++) low[i] = high[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    __m512bh b_low = (__m512bh)_mm512_loadu_si512(b + k * KEY_ROW);
    __m512bh b_high = (__m512bh)_mm512_loadu_si512(b + k * KEY_ROW + LANES);
    for (int i = 0; i < rows; i++) {
      __m512bh left = (__m512bh)_mm512_set1_ps(a[i * a_row + k]);
      low[i] = _mm512_dpbf16_ps(low[i], left, b_low);
      high[i] = _mm512_dpbf16_ps(high[i], left, b_high);
    }
  }
  for (int i = 0; i < rows; i++) {
    _mm512_storeu_ps(c + i * TILE, _mm512_mul_ps(low[i], _mm512_set1_ps(factor)));
    _mm512_storeu_ps(c + i * TILE + LANES, _mm512_mul_ps(high[i], _mm512_set1_ps(factor)));
  }
}

static void product_pairs(int64_t rows, int64_t columns, int64_t depth, const float *a,
                          const float *b, float *c, float factor) {
  for (int64_t column = 0; column < columns; column += PANEL)
    for (int64_t row = 0; row < rows; row += BLOCK) {
      const float *left = a + row * depth, *right = b + column;
      float *to = c + row * TILE + column;
#define CALL(n) product_of_pairs(n, left, depth, right, to, depth, factor)
      FOR_ROWS(rows - row, CALL)
#undef CALL
    }
}

INLINE __mmask32 first_of(int64_t count) { /* of 32 */
  return count >= 32 ? 0xFFFFFFFFu : ((uint32_t)1 << count) - 1;
}

/* bfloat16 rows that lie in one page, as columns of pairs: to[(dim + 1) / 2][KEY_ROW]. Up to 31
 * columns behind the last become zero; rows of `to` are written in sixteens. */
static void pairs_as(float *to, const char *from, const Storage *s, int64_t rows, int64_t dim) {
  if (s->row_stride == 2) { /* they lie as columns already */
    short order[2][32];
    for (int i = 0; i < 64; i++) order[i / 32][i % 32] = (short)(i / 2 + i % 2 * 32);
    __m512i first = _mm512_loadu_si512(order[0]), second = _mm512_loadu_si512(order[1]);
    for (int64_t d = 0; d < dim; d += 2)
      for (int64_t row = 0; row < rows; row += 32) {
        const char *at = from + d * s->column_stride + row * 2;
        __mmask32 mask = first_of(rows - row);
        __m512i even = _mm512_maskz_loadu_epi16(mask, at), odd = _mm512_setzero_si512();
        if (d + 1 < dim) odd = _mm512_maskz_loadu_epi16(mask, at + s->column_stride);
        float *pairs = to + d / 2 * KEY_ROW + row;
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, first, odd));
        _mm512_storeu_si512(pairs + 16, _mm512_permutex2var_epi16(even, second, odd));
      }
    return;
  }
  for (int64_t row = 0; row < rows; row += 16)
    for (int64_t d = 0; d < dim; d += 32) {
      __m512 a[16];
      __mmask32 mask = first_of(dim - d);
      const char *at = from + row * s->row_stride + d * 2;
      if (row + 16 <= rows)
        for (int i = 0; i < 16; i++)
          a[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, at + i * s->row_stride));
      else
        for (int i = 0; i < 16; i++)
          a[i] = row + i < rows ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(
                                      mask, at + i * s->row_stride))
                                : _mm512_setzero_ps();
      transpose16(to + d / 2 * KEY_ROW + row, a);
    }
}

/* Whether all are bfloat16 numbers. */
static int are_halves(const float *numbers, int64_t count) {
  uint32_t low = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, numbers + i, 4);
    low |= bits & 0xFFFF;
  }
  return !low;
}

static void as_pairs(float *to, const float *from, int64_t count) {
  for (int64_t i = 0; i < count; i += 2) {
    uint32_t even, odd = 0;
    memcpy(&even, from + i, 4);
    if (i + 1 < count) memcpy(&odd, from + i + 1, 4);
    even = even >> 16 | (odd & 0xFFFF0000u);
    memcpy(to + i / 2, &even, 4);
  }
}
#else
enum { HAS_PAIRS = 0 };
static void product_pairs(int64_t rows, int64_t columns, int64_t depth, const float *a,
                          const float *b, float *c, float factor) {}
static void pairs_as(float *to, const char *from, const Storage *s, int64_t rows, int64_t dim) {}
static int are_halves(const float *numbers, int64_t count) { return 0; }
static void as_pairs(float *to, const float *from, int64_t count) {}
#endif

/* 2^x for x <= 0; 0 below -126; NaN stays NaN. */
INLINE Vector exp2_of(Vector x) {
  static const float taylor[] = {1.52527338e-5f, 1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f,
                                 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f};
#ifdef __AVX512F__
  __mmask16 is_some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  Vector whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Vector is_zero = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x); /* of a NaN the second is taken */
  Vector whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  Vector part = V(sub_ps)(x, whole), sum = V(set1_ps)(taylor[0]);
  for (int i = 1; i < 8; i++) sum = V(fmadd_ps)(sum, part, V(set1_ps)(taylor[i]));
#ifdef __AVX512F__
  return _mm512_maskz_scalef_ps(is_some, sum, whole);
#else
  __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  sum = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), power));
  return _mm256_andnot_ps(is_zero, sum);
#endif
}

static float exp2_one(float x) { /* minus infinity included */
  return x < -126.0f ? 0.0f : exp2f(x);
}

#ifdef __AVX512F__
INLINE float largest_of(Vector x) { return _mm512_reduce_max_ps(x); }
INLINE float sum_of(Vector x) { return _mm512_reduce_add_ps(x); }
#else
#define OF_LANES(name, join)                                                               \
  INLINE float name(Vector x) {                                                            \
    __m128 four = join##_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));       \
    __m128 two = join##_ps(four, _mm_movehl_ps(four, four));                               \
    return _mm_cvtss_f32(join##_ss(two, _mm_movehdup_ps(two)));                            \
  }
OF_LANES(largest_of, _mm_max)
OF_LANES(sum_of, _mm_add)
#endif

/* One row of a tile: scores become weights relative to the row's maximum so far. */
static void soften(float *scores, int64_t seen, int64_t width, float *largest, float *total,
                   float *output, int64_t value_width) {
  for (int64_t i = seen; i < width; i++) scores[i] = -INFINITY;
  if (seen == 0) {
    memset(scores, 0, width * sizeof(float));
    return;
  }
  Vector most = V(set1_ps)(*largest);
  for (int64_t i = 0; i < width; i += LANES) most = V(max_ps)(most, V(loadu_ps)(scores + i));
  float base = largest_of(most);
  if (base > *largest) {
    float shrink = exp2_one(*largest - base);
    *largest = base;
    *total *= shrink;
    for (int64_t i = 0; i < value_width; i++) output[i] *= shrink;
  }
  Vector sum = V(setzero_ps)();
  for (int64_t i = 0; i < width; i += LANES) {
    Vector weight = exp2_of(V(sub_ps)(V(loadu_ps)(scores + i), V(set1_ps)(base)));
    V(storeu_ps)(scores + i, weight);
    sum = V(add_ps)(sum, weight);
  }
  *total += sum_of(sum);
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
#ifdef __AVX512F__
  if (s->column_stride == size && dim % 16 == 0)
    for (; row + 16 <= rows; row += 16)
      for (int64_t d = 0; d < dim; d += 16) {
        __m512 a[16];
        for (int i = 0; i < 16; i++)
          a[i] = load_lanes(from + (row + i) * s->row_stride + d * size, dtype);
        transpose16(to + d * KEY_ROW + row, a);
      }
#endif
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

INLINE int64_t at_most(int64_t limit, int64_t count) { return count < limit ? count : limit; }

/* Where row `row` of a head lies; `left` becomes the rows from there to the end of its page. */
INLINE const char *row_at(const Storage *s, const int64_t *pages, int64_t head, int64_t row,
                          int64_t *left) {
  int64_t inside = row % s->page_rows;
  *left = s->page_rows - inside;
  return s->data + pages[row / s->page_rows] * s->page_stride + head * s->head_stride +
         inside * s->row_stride;
}

enum { COLUMNS, PAIRS, ROWWISE };

/* Rows [first, first + count) of a head, page by page; `width` is that of rows. */
static void load(float *to, const Storage *s, const int64_t *pages, int64_t head, int64_t first,
                 int64_t count, int64_t dim, int64_t width, int as) {
  for (int64_t done = 0, run; done < count; done += run) {
    const char *from = row_at(s, pages, head, first + done, &run);
    run = run < count - done ? run : count - done;
    if (as == PAIRS) {
      pairs_as(to + done, from, s, run, dim);
      continue;
    }
#define LOAD(type)                                                                    \
  case type:                                                                          \
    if (as == ROWWISE) rows_as(to + done * width, from, s, run, dim, width, type);    \
    else columns_as(to + done, from, s, run, dim, type);                              \
    break
    switch (s->dtype) { LOAD(FLOAT32); LOAD(BFLOAT16); LOAD(FLOAT16); LOAD(E4M3); }
  }
}

/* Ask for a tile's rows before they are read: they are in scattered pages, which the CPU cannot
 * foresee. */
static void fetch(const Storage *s, const int64_t *pages, int64_t head, int64_t first,
                  int64_t count, int64_t dim) {
  int64_t size = size_of(s->dtype);
  for (int64_t done = 0, run; done < count; done += run) {
    const char *from = row_at(s, pages, head, first + done, &run);
    run = run < count - done ? run : count - done;
    int is_turned = s->row_stride == size;
    int64_t lines = is_turned ? dim : run, bytes = size * (is_turned ? run : dim);
    int64_t stride = is_turned ? s->column_stride : s->row_stride;
    for (int64_t i = 0; i < lines; i++)
      for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(from + i * stride + at, _MM_HINT_T1);
  }
}

typedef struct {
  float *queries, *output, *largest, *total, *scores, *keys, *values;
} Work;

/* What all parts share. */
typedef struct {
  int64_t heads, group, dim, value_dim, value_width;
  float scale;
  int are_halves; /* all queries are bfloat16 numbers */
} Shape;

INLINE int takes_pairs(const Shape *shape, const Storage *keys) {
  return HAS_PAIRS && shape->are_halves && keys->dtype == BFLOAT16 &&
         (keys->row_stride == 2 || keys->column_stride == 2);
}

/* One part for one KV head: unnormalised sums of its rows into `work`. */
static void attend_part(const Part *part, const Storage *storages, const Work *work,
                        const Shape *shape, int64_t head, const Part *next, int64_t next_head) {
  const Storage *ks = storages + part->keys, *vs = storages + part->values;
  int64_t rows = part->num_rows * shape->group, dim = shape->dim, depth = (dim + 1) / 2;
  int64_t value_width = shape->value_width, value_row = value_width + PANEL;
  int is_paired = takes_pairs(shape, ks);
  /* What few rows read once is not worth a copy. */
  int is_direct = rows <= BLOCK && vs->column_stride == size_of(vs->dtype) &&
                  shape->value_dim == value_width;
  int64_t tile = is_direct ? 32 : TILE;
  for (int64_t first = 0; first < part->num_tokens; first += tile) {
    int64_t count = at_most(tile, part->num_tokens - first);
    int64_t width = (count + PANEL - 1) / PANEL * PANEL;
    fetch(vs, part->value_pages, head, part->first_value + first, count, shape->value_dim);
    load(work->keys, ks, part->key_pages, head, part->first_key + first, count, dim, 0,
         is_paired ? PAIRS : COLUMNS);
    if (!is_direct)
      load(work->values, vs, part->value_pages, head, part->first_value + first, count,
           shape->value_dim, value_row, ROWWISE);
    if (first + tile < part->num_tokens)
      fetch(ks, part->key_pages, head, part->first_key + first + tile,
            at_most(tile, part->num_tokens - first - tile), dim);
    else if (next)
      fetch(storages + next->keys, next->key_pages, next_head, next->first_key,
            at_most(tile, next->num_tokens), dim);
    for (int64_t row = 0; row < rows; row += ROWS) {
      int64_t some = rows - row < ROWS ? rows - row : ROWS;
      /* The last row sees most. */
      if (part->is_causal && part->first_seen + (row + some - 1) / shape->group + 1 <= first)
        continue;
      if (is_paired)
        product_pairs(some, width, depth, work->queries + row * depth, work->keys, work->scores,
                      shape->scale);
      else
        product(some, width, dim, work->queries + row * dim, dim, work->keys, KEY_ROW,
                work->scores, TILE, 0);
      for (int64_t i = row; i < row + some; i++) {
        float *scores = work->scores + (i - row) * TILE;
        int64_t seen = part->is_causal ? part->first_seen + i / shape->group + 1 - first : count;
        soften(scores, seen < 0 ? 0 : seen < count ? seen : count, width, work->largest + i,
               work->total + i, work->output + i * value_width, value_width);
        if (part->scale_kind == BY_PAGE)
          for (int64_t t = 0; t < count; t++)
            scores[t] *= part->scale[(part->first_value + first + t) / vs->page_rows *
                                         shape->heads + head];
      }
      float *output = work->output + row * value_width;
      if (is_direct)
        for (int64_t done = 0, run; done < count; done += run) {
          const char *from =
              row_at(vs, part->value_pages, head, part->first_value + first + done, &run);
          run = run < count - done ? run : count - done;
          product_stored(some, value_width, run, work->scores + done, TILE, from, vs->row_stride,
                         vs->dtype, output, value_width);
        }
      else
        product(some, value_width, count, work->scores, TILE, work->values, value_row, output,
                value_width, 1);
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
  int suits = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
#ifdef __AVX512F__
  suits = suits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#ifdef __AVX512BF16__
  suits = suits && __builtin_cpu_supports("avx512bf16");
#endif
  return suits;
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
  /* Pairs are written sixteen rows at a time. */
  int64_t key_rows = dim < 16 ? 16 : dim;
  int64_t sizes[] = {most * dim, most * value_width, most, most, ROWS * TILE, key_rows * KEY_ROW,
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

  Shape shape = {kv_heads, group, dim, value_dim, value_width, scale,
                 are_halves(queries, num_rows * num_heads * dim)};
  for (int64_t p = 0; p < num_parts; p++)
    for (int64_t head = 0; head < kv_heads; head++) {
      const Part *part = parts + p;
      int64_t rows = part->num_rows * group;
      int is_paired = takes_pairs(&shape, storages + part->keys);
      for (int64_t i = 0; i < rows; i++) {
        const float *from = queries + (part->rows[i / group] * num_heads + head * group + i % group) * dim;
        if (is_paired) as_pairs(work.queries + i * ((dim + 1) / 2), from, dim);
        else
          for (int64_t d = 0; d < dim; d++) work.queries[i * dim + d] = from[d] * scale;
        work.largest[i] = -INFINITY, work.total[i] = 0.0f;
      }
      memset(work.output, 0, rows * value_width * sizeof(float));
      int is_last = head + 1 == kv_heads;
      const Part *next = !is_last ? part : p + 1 < num_parts ? part + 1 : 0;
      attend_part(part, storages, &work, &shape, head, next, is_last ? 0 : head + 1);
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
