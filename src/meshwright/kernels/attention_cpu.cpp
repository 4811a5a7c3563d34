// Causal attention on x86 processors, tile by tile as in flash attention (Dao et al. 2022).
//
// Shapes as in attention_cpu.py: q (B, T, H, d), k (B, S, K, d), v (B, S, K, v), bias (1 or B, 1, T, S), out
// (B, T, H, v), all contiguous, and lse (B, H, T), the logarithm of the sum of a query's exponentials. Tensors
// are in format T, products in format P with sums in fp32: P is float where the processor has no products in T.
//
// A unit of work is one key head of one sequence. Its keys and values are laid out once for oneDNN's brgemm,
// which multiplies A (rows as they stand) with B ("packed": in bf16 the numbers of two rows lie side by side).

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "tile_layouts.h"

namespace {

using meshwright::Buffer;
using meshwright::cast;
using meshwright::copy_columns;
using meshwright::copy_rows;
using meshwright::exponential;
using meshwright::hyperbolic_tangent;
using meshwright::pack_columns;
using meshwright::pack_rows;
using meshwright::SIDE;

constexpr int64_t QUERIES = 64;       // of a tile
constexpr int64_t PANEL = 64;         // keys that one product of a forward multiplies with
constexpr int64_t FORWARD_KEYS = 512; // of a tile at most
constexpr int64_t BACKWARD_KEYS = 128;
constexpr int64_t LANES = 16;         // numbers of a vector at most
constexpr float INF = std::numeric_limits<float>::infinity();

struct Sizes {
  int64_t batch, queries, keys, heads, key_heads, dim, value_dim, bias_batch, threads;
  float softcap;  // 0 for none
};

constexpr int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// C (m, n) = A (m, k) B (k, n), or C + A B; B is packed.
template <typename P>
void multiply(int64_t m, int64_t n, int64_t k, int64_t line_a, int64_t line_c, bool add, const P* a, const P* b,
              float* c) {
  constexpr bool pairs = sizeof(P) == 2;
#ifdef PLAIN_PRODUCTS  // for tests, on processors without products in bf16
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = add ? c[i * line_c + j] : 0.0f;
      for (int64_t l = 0; l < k; ++l) {
        const int64_t at = pairs ? l / 2 * 2 * n + 2 * j + l % 2 : l * n + j;
        sum += static_cast<float>(a[i * line_a + l]) * static_cast<float>(b[at]);
      }
      c[i * line_c + j] = sum;
    }
#else
  at::native::cpublas::brgemm(m, n, k, line_a, n, line_c, add, a, b, c, pairs);
#endif
}

template <typename T>
inline bool is_seen(T x) {
  return cast<float>(x) != -INF;
}

// Ask for a row that is read, or written, soon. Inlined, or GCC drops calls of a function that does nothing else.
template <bool WRITTEN = false, typename T>
[[gnu::always_inline]] inline void prefetch(const T* row, int64_t width) {
  for (int64_t j = 0; j < width; j += 64 / sizeof(T)) __builtin_prefetch(row + j, WRITTEN, 2);
}

// What both directions know of a tile's tensors.
struct Work {
  explicit Work(const Sizes& sizes)
      : s(sizes), group(s.heads / s.key_heads), before(s.keys - s.queries),
        scale(1.0f / std::sqrt(static_cast<float>(s.dim))) {}

  int64_t query(int64_t b, int64_t t, int64_t h) const { return (b * s.queries + t) * s.heads + h; }
  int64_t key(int64_t b, int64_t at, int64_t head) const { return (b * s.keys + at) * s.key_heads + head; }
  int64_t bias(int64_t b, int64_t t) const { return ((b % s.bias_batch) * s.queries + t) * s.keys; }
  int64_t lse(int64_t b, int64_t t, int64_t h) const { return (b * s.heads + h) * s.queries + t; }

  // Keys of a tile, from key `from` on, that query `t` may see by its position.
  int64_t seen(int64_t t, int64_t from, int64_t width) const {
    return std::clamp<int64_t>(before + t + 1 - from, 0, std::min(width, s.keys - from));
  }

  // The first key that one of the queries from `first` on sees by the bias: the keys of earlier documents, or
  // before a window, are skipped.
  template <typename T>
  int64_t begin(const T* biases, int64_t b, int64_t first, int64_t rows) const {
    int64_t found = before + first + rows;
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = biases + bias(b, first + r);
      found = std::min(found, static_cast<int64_t>(std::find_if(row, row + std::min(found, s.keys), is_seen<T>) - row));
    }
    return found;
  }

  // True if the bias of a tile's scores is not 0 everywhere that a query may see.
  template <typename T>
  bool changes(const T* biases, int64_t b, int64_t first, int64_t rows, int64_t from, int64_t width) const {
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = biases + bias(b, first + r) + from;
      bool other = false;
      for (int64_t j = 0; j < seen(first + r, from, width); ++j) other |= cast<float>(row[j]) != 0.0f;
      if (other) return true;
    }
    return false;
  }

  const Sizes s;
  const int64_t group, before;
  const float scale;
};

template <typename T>
struct ForwardTensors {
  const T *q, *k, *v, *bias;
  T* out;
  float* lse;
};

template <typename T, typename P>
class Forward : Work {
 public:
  Forward(const ForwardTensors<T>& tensors, const Sizes& sizes)
      : Work(sizes), x(tensors), all(padded(s.keys, PANEL)), line(std::min(FORWARD_KEYS, all) + LANES),
        keys(all * s.dim), values(all * s.value_dim), queries(QUERIES * s.dim), chances(QUERIES * line),
        scores(QUERIES * line), mixed(QUERIES * s.value_dim), most(QUERIES), sums(QUERIES) {}

  void operator()(int64_t b, int64_t head) {
    for (int64_t at = 0; at < all; at += PANEL)
      pack_columns<P>(keys + at * s.dim, x.k + key(b, at, head) * s.dim, std::min(PANEL, s.keys - at), PANEL, s.dim,
                      s.key_heads * s.dim);
    pack_rows<P>(values, x.v + key(b, 0, head) * s.value_dim, s.keys, all, s.value_dim, s.key_heads * s.value_dim);
    for (int64_t h = head * group; h < (head + 1) * group; ++h)
      for (int64_t first = 0; first < s.queries; first += QUERIES)
        attend(b, h, first, std::min(QUERIES, s.queries - first));
  }

 private:
  void attend(int64_t b, int64_t h, int64_t first, int64_t rows) {
    copy_rows<P>(queries, x.q + query(b, first, h) * s.dim, rows, rows, s.dim, s.heads * s.dim);
    std::fill_n(&most[0], rows, -INF);
    std::fill_n(&sums[0], rows, 0.0f);
    std::fill_n(&mixed[0], rows * s.value_dim, 0.0f);
    const int64_t end = before + first + rows;
    const int64_t begin = x.bias == nullptr ? 0 : Work::begin(x.bias, b, first, rows) / PANEL * PANEL;
    for (int64_t from = begin; from < end; from += FORWARD_KEYS) {
      const int64_t width = padded(std::min(FORWARD_KEYS, end - from), PANEL);
      for (int64_t at = 0; at < width; at += PANEL)
        multiply<P>(rows, PANEL, s.dim, s.dim, line, false, queries, keys + (from + at) * s.dim, scores + at);
      const bool biased = x.bias != nullptr && changes(x.bias, b, first, rows, from, width);
      for (int64_t r = 0; r < rows; ++r) {
        if (from == begin) prefetch_query(b, h, first + r);
        soften(r, biased ? x.bias + bias(b, first + r) + from : nullptr, seen(first + r, from, width), width);
      }
      const P* left;
      if constexpr (std::is_same_v<P, float>) left = scores;
      else left = chances;
      multiply<P>(rows, s.value_dim, width, line, s.value_dim, true, left, values + from * s.value_dim, mixed);
    }
    for (int64_t r = 0; r < rows; ++r) {
      T* out = x.out + query(b, first + r, h) * s.value_dim;
      const float over = 1.0f / sums[r];
      for (int64_t j = 0; j < s.value_dim; ++j) out[j] = cast<T>(mixed[r * s.value_dim + j] * over);
      x.lse[lse(b, first + r, h)] = most[r] + std::log(sums[r]);
    }
  }

  // Ask for the rows that are written of query t, and for those that are read of its like in the next tile.
  [[gnu::always_inline]] void prefetch_query(int64_t b, int64_t h, int64_t t) const {
    prefetch<true>(x.out + query(b, t, h) * s.value_dim, s.value_dim);
    t += QUERIES;
    if (t < s.queries) prefetch(x.q + query(b, t, h) * s.dim, s.dim);
  }

  // Replace the scores of row r with exponentials of those that it sees and with zeros, and bring its sums and
  // what was mixed so far to the greatest score that is known now.
  void soften(int64_t r, const T* added, int64_t seen, int64_t width) {
    float *row = scores + r * line, top = -INF, sum = 0, step = scale;
    if (s.softcap != 0.0f) {
      const float over = scale / s.softcap;
#pragma omp simd
      for (int64_t j = 0; j < seen; ++j) row[j] = s.softcap * hyperbolic_tangent(row[j] * over);
      step = 1.0f;
    }
    if (added != nullptr) {
      for (int64_t j = 0; j < seen; ++j) row[j] = row[j] * step + static_cast<float>(added[j]);
      step = 1.0f;
    }
    std::fill_n(row + seen, LANES, -INF);  // then only whole vectors are left
    const int64_t whole = padded(seen, LANES);
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < whole; ++j) top = row[j] > top ? row[j] : top;
    const float old = most[r], now = std::max(old, top * step);
    const float base = now == -INF ? 0.0f : now;  // the row saw no key yet
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < whole; ++j) {
      row[j] = exponential(row[j] * step - base);
      sum += row[j];
    }
    if constexpr (std::is_same_v<P, float>) {
      std::fill(row + whole, row + width, 0.0f);
    } else {
      P* chance = chances + r * line;
      for (int64_t j = 0; j < whole; ++j) chance[j] = cast<P>(row[j]);
      std::fill(chance + whole, chance + width, P(0));
    }
    most[r] = now;
    if (old == now) {
      sums[r] += sum;
      return;
    }
    const float shrink = exponential(old - base);
    sums[r] = sums[r] * shrink + sum;
    for (int64_t j = 0; j < s.value_dim; ++j) mixed[r * s.value_dim + j] *= shrink;
  }

  const ForwardTensors<T> x;
  const int64_t all, line;
  Buffer<P> keys, values, queries, chances;
  Buffer<float> scores, mixed, most, sums;
};

template <typename T>
struct BackwardTensors {
  const T *grad, *q, *k, *v, *bias, *out;
  const float* lse;
  T *grad_q, *grad_k, *grad_v;
};

// A tile's scores are made transposed, (keys, queries), as products with queries on the right: then nothing but
// the gradient of the queries, once for all of a tile's keys, needs to be transposed again.
template <typename T, typename P>
class Backward : Work {
 public:
  Backward(const BackwardTensors<T>& tensors, const Sizes& sizes)
      : Work(sizes), x(tensors), all(padded(s.keys, BACKWARD_KEYS)), keys(all * s.dim), turned(all * s.dim),
        values(all * s.value_dim), queries(QUERIES * s.dim), queries_t(QUERIES * s.dim),
        grads(QUERIES * s.value_dim), grads_t(QUERIES * s.value_dim), chances(TILE), slopes(TILE),
        packed_slopes(TILE), scores(TILE), products(TILE), added(TILE), grad_q_t(QUERIES * s.dim),
        grad_q(QUERIES * padded(s.dim, SIDE)), grad_k(all * s.dim), grad_v(all * s.value_dim), logs(QUERIES),
        means(QUERIES) {}

  void operator()(int64_t b, int64_t head) {
    const int64_t stride = s.key_heads * s.dim, value_stride = s.key_heads * s.value_dim;
    const T* from = x.k + key(b, 0, head) * s.dim;
    copy_rows<P>(keys, from, s.keys, all, s.dim, stride);
    copy_rows<P>(values, x.v + key(b, 0, head) * s.value_dim, s.keys, all, s.value_dim, value_stride);
    for (int64_t at = 0; at < all; at += BACKWARD_KEYS)
      copy_columns<P>(turned + at * s.dim, from + at * stride, std::min(BACKWARD_KEYS, s.keys - at), BACKWARD_KEYS,
                      s.dim, stride);
    std::fill_n(&grad_k[0], all * s.dim, 0.0f);
    std::fill_n(&grad_v[0], all * s.value_dim, 0.0f);
    for (int64_t h = head * group; h < (head + 1) * group; ++h)
      for (int64_t first = 0; first < s.queries; first += QUERIES)
        differentiate(b, h, first, std::min(QUERIES, s.queries - first));
    for (int64_t i = 0; i < s.keys; ++i) {
      T *to_k = x.grad_k + key(b, i, head) * s.dim, *to_v = x.grad_v + key(b, i, head) * s.value_dim;
      for (int64_t j = 0; j < s.dim; ++j) to_k[j] = cast<T>(grad_k[i * s.dim + j] * scale);
      for (int64_t j = 0; j < s.value_dim; ++j) to_v[j] = cast<T>(grad_v[i * s.value_dim + j]);
    }
  }

 private:
  static constexpr int64_t TILE = BACKWARD_KEYS * QUERIES;

  void differentiate(int64_t b, int64_t h, int64_t first, int64_t rows) {
    read_queries(b, h, first, rows);
    std::fill_n(&grad_q_t[0], QUERIES * s.dim, 0.0f);
    const int64_t end = before + first + rows;
    const int64_t begin = x.bias == nullptr ? 0 : Work::begin(x.bias, b, first, rows) / BACKWARD_KEYS * BACKWARD_KEYS;
    int64_t fetched = 0;
    for (int64_t from = begin; from < end; from += BACKWARD_KEYS) {
      const int64_t width = std::min(BACKWARD_KEYS, padded(end - from, PANEL));
      multiply<P>(width, QUERIES, s.dim, s.dim, QUERIES, false, keys + from * s.dim, queries_t, scores);
      multiply<P>(width, QUERIES, s.value_dim, s.value_dim, QUERIES, false, values + from * s.value_dim, grads_t,
                  products);
      const bool biased = x.bias != nullptr && changes(x.bias, b, first, rows, from, width);
      if (biased) turn_bias(b, first, rows, from, width);
      for (int64_t j = 0; j < width; ++j) {
        // One query after another as keys pass by: so many requests at once would have to wait.
        if (fetched < rows && fetched * (end - begin) <= (from + j - begin) * rows)
          prefetch_query(b, h, first + fetched++);
        slope(j, biased ? added + j * QUERIES : nullptr, std::clamp<int64_t>(from + j - before - first, 0, QUERIES));
      }
      const P *chance, *left, *right;
      if constexpr (std::is_same_v<P, float>) {
        chance = scores, left = right = products;
      } else {
        for (int64_t i = 0; i < width * QUERIES; ++i) chances[i] = cast<P>(scores[i]);
        for (int64_t i = 0; i < width * QUERIES; ++i) slopes[i] = cast<P>(products[i]);
        pack_rows<P, P>(packed_slopes, slopes, width, width, QUERIES, QUERIES);
        chance = chances, left = slopes, right = packed_slopes;
      }
      multiply<P>(width, s.value_dim, QUERIES, QUERIES, s.value_dim, true, chance, grads, grad_v + from * s.value_dim);
      multiply<P>(width, s.dim, QUERIES, QUERIES, s.dim, true, left, queries, grad_k + from * s.dim);
      multiply<P>(s.dim, QUERIES, width, BACKWARD_KEYS, QUERIES, true, turned + from * s.dim, right, grad_q_t);
    }
    const int64_t wide = padded(s.dim, SIDE);
    copy_columns<float, float>(grad_q, grad_q_t, s.dim, wide, QUERIES, QUERIES);
    for (int64_t r = 0; r < rows; ++r) {
      T* to = x.grad_q + query(b, first + r, h) * s.dim;
      for (int64_t j = 0; j < s.dim; ++j) to[j] = cast<T>(grad_q[r * wide + j] * scale);
    }
  }

  // Ask for the rows that are written of query t, and for those that are read of its like in the next tile.
  [[gnu::always_inline]] void prefetch_query(int64_t b, int64_t h, int64_t t) const {
    prefetch<true>(x.grad_q + query(b, t, h) * s.dim, s.dim);
    t += QUERIES;
    if (t >= s.queries) return;
    prefetch(x.q + query(b, t, h) * s.dim, s.dim);
    prefetch(x.grad + query(b, t, h) * s.value_dim, s.value_dim);
    prefetch(x.out + query(b, t, h) * s.value_dim, s.value_dim);
  }

  void read_queries(int64_t b, int64_t h, int64_t first, int64_t rows) {
    const int64_t stride = s.heads * s.dim, value_stride = s.heads * s.value_dim;
    const T *q = x.q + query(b, first, h) * s.dim, *grad = x.grad + query(b, first, h) * s.value_dim,
            *out = x.out + query(b, first, h) * s.value_dim;
    pack_rows<P>(queries, q, rows, QUERIES, s.dim, stride);
    pack_columns<P>(queries_t, q, rows, QUERIES, s.dim, stride);
    pack_rows<P>(grads, grad, rows, QUERIES, s.value_dim, value_stride);
    pack_columns<P>(grads_t, grad, rows, QUERIES, s.value_dim, value_stride);
    std::fill_n(&logs[0], QUERIES, INF);  // queries that are not there have no probabilities
    std::fill_n(&means[0], QUERIES, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < s.value_dim; ++j)
        sum += static_cast<float>(grad[r * value_stride + j]) * static_cast<float>(out[r * value_stride + j]);
      means[r] = sum;
      logs[r] = x.lse[lse(b, first + r, h)];
    }
  }

  // The bias of a tile, (keys, queries).
  void turn_bias(int64_t b, int64_t first, int64_t rows, int64_t from, int64_t width) {
    std::fill_n(&added[0], TILE, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = x.bias + bias(b, first + r) + from;
      for (int64_t j = 0; j < seen(first + r, from, width); ++j) added[j * QUERIES + r] = cast<float>(row[j]);
    }
  }

  // Replace the scores of key j with probabilities, and the gradients of these with those of the scores, for
  // queries from `hidden` on.
  void slope(int64_t j, const float* bias, int32_t hidden) {
    float *score = scores + j * QUERIES, *product = products + j * QUERIES, step = scale;
    float steep[QUERIES];  // the cap's derivative
    if (s.softcap != 0.0f) {
      const float over = scale / s.softcap;
#pragma omp simd
      for (int32_t r = 0; r < QUERIES; ++r) {
        const float share = hyperbolic_tangent(score[r] * over);
        score[r] = s.softcap * share;
        steep[r] = 1.0f - share * share;
      }
      step = 1.0f;
    }
    if (bias != nullptr) {
      for (int32_t r = 0; r < QUERIES; ++r) score[r] = score[r] * step + bias[r];
      step = 1.0f;
    }
    const float *log = logs, *mean = means;
#pragma omp simd
    for (int32_t r = 0; r < QUERIES; ++r) {
      const float chance = r < hidden ? 0.0f : exponential(score[r] * step - log[r]);
      score[r] = chance;
      product[r] = chance * (product[r] - mean[r]);
    }
    if (s.softcap != 0.0f)
      for (int32_t r = 0; r < QUERIES; ++r) product[r] *= steep[r];
  }

  const BackwardTensors<T> x;
  const int64_t all;
  Buffer<P> keys, turned, values, queries, queries_t, grads, grads_t, chances, slopes, packed_slopes;
  Buffer<float> scores, products, added, grad_q_t, grad_q, grad_k, grad_v, logs, means;
};

// Give units to threads, each with buffers of its own; false if one of them failed.
template <typename Worker, typename Tensors>
bool run(const Tensors& tensors, const Sizes& s) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(s.threads)
  {
    try {
      Worker work(tensors, s);
      for (int64_t unit; (unit = next++) < s.batch * s.key_heads;) work(unit / s.key_heads, unit % s.key_heads);
    } catch (...) {  // no memory, or no kernel in oneDNN; an exception may not leave the region
      failed = true;
    }
#ifndef PLAIN_PRODUCTS
    at::native::cpublas::brgemm_release();
#endif
  }
  return !failed;
}

}  // namespace

#define EXPORT(NAME, T, P)                                                                                     \
  extern "C" bool NAME##_forward(const Sizes* s, const T* q, const T* k, const T* v, const T* bias, T* out,    \
                                 float* lse) {                                                                 \
    return run<Forward<T, P>>(ForwardTensors<T>{q, k, v, bias, out, lse}, *s);                                 \
  }                                                                                                            \
  extern "C" bool NAME##_backward(const Sizes* s, const T* grad, const T* q, const T* k, const T* v,           \
                                  const T* bias, const T* out, const float* lse, T* grad_q, T* grad_k,         \
                                  T* grad_v) {                                                                 \
    return run<Backward<T, P>>(BackwardTensors<T>{grad, q, k, v, bias, out, lse, grad_q, grad_k, grad_v}, *s); \
  }

EXPORT(fp32, float, float)
EXPORT(bf16, at::BFloat16, at::BFloat16)
EXPORT(bf16_by_fp32, at::BFloat16, float)
EXPORT(fp16_by_fp32, at::Half, float)
