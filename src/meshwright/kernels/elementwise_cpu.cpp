// RMSNorm (Zhang and Sennrich 2019), SwiGLU (Shazeer 2020), rotary positions (Su et al. 2021) and the softmax's
// cross-entropy on x86 processors, each in one pass.
//
// Tensors are contiguous, in format T; what is computed between is in fp32.

#include <algorithm>
#include <limits>

#include "cpu_kernels.h"

namespace {

using meshwright::cast;
using meshwright::exponential;

constexpr int64_t PIECE = 16384;  // elements that a thread takes at a time

// y = weight * x * scale of rows (rows, width), scale = 1 / sqrt(mean(x^2) + eps).
template <typename T>
void rms_norm(int64_t threads, int64_t rows, int64_t width, float eps, const T* x, const T* weight, T* y,
              float* scales) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = x + i * width;
    T* to = y + i * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; ++j) {
      const float value = cast<float>(row[j]);
      sum += value * value;
    }
    const float scale = scales[i] = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) to[j] = cast<T>(cast<float>(row[j]) * scale * cast<float>(weight[j]));
  }
}

// grad_x = scale * (grad * weight - x * scale^2 * mean(grad * weight * x)); grad_weight (width) in fp32 is the sum
// over rows of grad * x * scale, first over `part_rows` at a time, whatever the threads: `sums` has room for
// (rows / part_rows rounded up, width).
template <typename T>
void rms_norm_backward(int64_t threads, int64_t rows, int64_t width, int64_t part_rows, const T* grad, const T* x,
                       const T* weight, const float* scales, T* grad_x, float* grad_weight, float* sums) {
  const int64_t parts = (rows + part_rows - 1) / part_rows;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t part = 0; part < parts; ++part) {
      float* sum = sums + part * width;
      std::fill_n(sum, width, 0.0f);
      for (int64_t i = part * part_rows; i < std::min(rows, (part + 1) * part_rows); ++i) {
        const T *row = x + i * width, *slope = grad + i * width;
        T* to = grad_x + i * width;
        const float scale = scales[i];
        float along = 0;
#pragma omp simd reduction(+ : along)
        for (int64_t j = 0; j < width; ++j) {
          const float product = cast<float>(slope[j]) * cast<float>(row[j]);
          along += product * cast<float>(weight[j]);
          sum[j] += product * scale;
        }
        along *= -scale * scale / static_cast<float>(width);
#pragma omp simd
        for (int64_t j = 0; j < width; ++j)
          to[j] = cast<T>(scale * (cast<float>(slope[j]) * cast<float>(weight[j]) + cast<float>(row[j]) * along));
      }
    }
#pragma omp for
    for (int64_t first = 0; first < width; first += 64) {
      const int64_t last = std::min(width, first + 64);
      std::fill(grad_weight + first, grad_weight + last, 0.0f);
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t j = first; j < last; ++j) grad_weight[j] += sums[part * width + j];
    }
  }
}

inline float sigmoid(float x) {
  const float small = exponential(-std::fabs(x)), over = 1.0f / (1.0f + small);
  return x < 0 ? small * over : over;
}

// y = silu(gate) * up.
template <typename T>
void swiglu(int64_t threads, int64_t size, const T* gate, const T* up, T* y) {
#pragma omp parallel for num_threads(threads)
  for (int64_t first = 0; first < size; first += PIECE) {
    const int64_t last = std::min(size, first + PIECE);
#pragma omp simd
    for (int64_t i = first; i < last; ++i) {
      const float x = cast<float>(gate[i]);
      y[i] = cast<T>(x * sigmoid(x) * cast<float>(up[i]));
    }
  }
}

template <typename T>
void swiglu_backward(int64_t threads, int64_t size, const T* grad, const T* gate, const T* up, T* grad_gate,
                     T* grad_up) {
#pragma omp parallel for num_threads(threads)
  for (int64_t first = 0; first < size; first += PIECE) {
    const int64_t last = std::min(size, first + PIECE);
#pragma omp simd
    for (int64_t i = first; i < last; ++i) {
      const float x = cast<float>(gate[i]), slope = cast<float>(grad[i]), part = sigmoid(x);
      grad_gate[i] = cast<T>(slope * cast<float>(up[i]) * part * (1.0f + x * (1.0f - part)));
      grad_up[i] = cast<T>(slope * x * part);
    }
  }
}

// y = silu(gate) * up * weight, a weight for each of the rows (rows, width).
template <typename T>
void weighted_swiglu(int64_t threads, int64_t rows, int64_t width, const T* gate, const T* up, const float* weights,
                     T* y) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    const float weight = weights[i];
#pragma omp simd
    for (int64_t j = i * width; j < (i + 1) * width; ++j) {
      const float x = cast<float>(gate[j]);
      y[j] = cast<T>(x * sigmoid(x) * cast<float>(up[j]) * weight);
    }
  }
}

// The gradients of gate, up and the weights (rows) from that of `weighted_swiglu`'s result, which is computed again
// in the place of its gradient.
template <typename T>
void weighted_swiglu_backward(int64_t threads, int64_t rows, int64_t width, T* grad, const T* gate, const T* up,
                              const float* weights, T* grad_gate, T* grad_up, float* grad_weights) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    const float weight = weights[i];
    float along = 0;
#pragma omp simd reduction(+ : along)
    for (int64_t j = i * width; j < (i + 1) * width; ++j) {
      const float x = cast<float>(gate[j]), other = cast<float>(up[j]), part = sigmoid(x);
      const float slope = cast<float>(grad[j]), product = x * part * other;
      along += slope * product;
      grad_gate[j] = cast<T>(slope * weight * other * part * (1.0f + x * (1.0f - part)));
      grad_up[j] = cast<T>(slope * weight * x * part);
      grad[j] = cast<T>(product * weight);
    }
    grad_weights[i] = along;
  }
}

// y = x with the last `turned` of each head's `dim` channels rotated in the direction of `sign`, and the others as
// they are; x (batch, tokens, heads, dim). The tables are of `tables` sequences, 1 or batch: cosines (tokens,
// turned), and sines (tokens, sine_width), whose last turned / 2 count.
template <typename T>
void rotate(int64_t threads, int64_t batch, int64_t tokens, int64_t heads, int64_t dim, int64_t turned,
            int64_t sine_width, int64_t tables, float sign, const T* x, const T* cosines, const T* sines, T* y) {
  const int64_t half = turned / 2, still = dim - turned;
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < batch * tokens; ++i) {
    const int64_t at = tables == 1 ? i % tokens : i;
    const T *cosine = cosines + at * turned, *sine = sines + (at + 1) * sine_width - half;
    for (int64_t h = 0; h < heads; ++h) {
      const T* from = x + (i * heads + h) * dim;
      T* to = y + (i * heads + h) * dim;
      std::copy(from, from + still, to);
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const float a = cast<float>(from[still + j]), b = cast<float>(from[still + half + j]);
        const float by = sign * cast<float>(sine[j]);
        to[still + j] = cast<T>(a * cast<float>(cosine[j]) - b * by);
        to[still + half + j] = cast<T>(b * cast<float>(cosine[half + j]) + a * by);
      }
    }
  }
}

// losses[i] = log(sum(exp(logits[i]))) - logits[i][target], 0 where the target is `ignored`. If `with_grad`, the
// logits (rows, width) become `factor` times the gradient of the sum of losses. False, and nothing done, if another
// target is not a column.
template <typename T>
bool cross_entropy(int64_t threads, int64_t rows, int64_t width, int64_t ignored, int64_t with_grad, float factor,
                   T* logits, const int64_t* targets, float* losses) {
  const auto is_wrong = [=](int64_t target) { return target != ignored && (target < 0 || target >= width); };
  if (std::any_of(targets, targets + rows, is_wrong)) return false;
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    T* row = logits + i * width;
    const int64_t target = targets[i];
    losses[i] = 0;
    if (target == ignored) {
      if (with_grad) std::fill_n(row, width, T(0));
      continue;
    }
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < width; ++j) most = cast<float>(row[j]) > most ? cast<float>(row[j]) : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; ++j) sum += exponential(cast<float>(row[j]) - most);
    const float whole = most + std::log(sum), log = (cast<float>(row[target]) - most) - std::log(sum);
    losses[i] = -log;
    if (!with_grad) continue;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) row[j] = cast<T>(factor * exponential(cast<float>(row[j]) - whole));
    row[target] = cast<T>(factor * std::expm1(log));  // p - 1, exact also where p is close to 1
  }
  return true;
}

}  // namespace

#define EXPORT(NAME, T)                                                                                         \
  extern "C" void NAME##_rms_norm(int64_t threads, int64_t rows, int64_t width, float eps, const T* x,          \
                                  const T* weight, T* y, float* scales) {                                       \
    rms_norm(threads, rows, width, eps, x, weight, y, scales);                                                  \
  }                                                                                                             \
  extern "C" void NAME##_rms_norm_backward(int64_t threads, int64_t rows, int64_t width, int64_t part_rows,     \
                                           const T* grad, const T* x, const T* weight, const float* scales,     \
                                           T* grad_x, float* grad_weight, float* sums) {                        \
    rms_norm_backward(threads, rows, width, part_rows, grad, x, weight, scales, grad_x, grad_weight, sums);     \
  }                                                                                                             \
  extern "C" void NAME##_swiglu(int64_t threads, int64_t size, const T* gate, const T* up, T* y) {              \
    swiglu(threads, size, gate, up, y);                                                                         \
  }                                                                                                             \
  extern "C" void NAME##_swiglu_backward(int64_t threads, int64_t size, const T* grad, const T* gate,           \
                                         const T* up, T* grad_gate, T* grad_up) {                               \
    swiglu_backward(threads, size, grad, gate, up, grad_gate, grad_up);                                         \
  }                                                                                                             \
  extern "C" void NAME##_weighted_swiglu(int64_t threads, int64_t rows, int64_t width, const T* gate,           \
                                         const T* up, const float* weights, T* y) {                             \
    weighted_swiglu(threads, rows, width, gate, up, weights, y);                                                \
  }                                                                                                             \
  extern "C" void NAME##_weighted_swiglu_backward(int64_t threads, int64_t rows, int64_t width, T* grad,        \
                                                  const T* gate, const T* up, const float* weights,             \
                                                  T* grad_gate, T* grad_up, float* grad_weights) {              \
    weighted_swiglu_backward(threads, rows, width, grad, gate, up, weights, grad_gate, grad_up, grad_weights);  \
  }                                                                                                             \
  extern "C" void NAME##_rotate(int64_t threads, int64_t batch, int64_t tokens, int64_t heads, int64_t dim,     \
                                int64_t turned, int64_t sine_width, int64_t tables, float sign, const T* x,     \
                                const T* cosines, const T* sines, T* y) {                                       \
    rotate(threads, batch, tokens, heads, dim, turned, sine_width, tables, sign, x, cosines, sines, y);         \
  }                                                                                                             \
  extern "C" bool NAME##_cross_entropy(int64_t threads, int64_t rows, int64_t width, int64_t ignored,           \
                                       int64_t with_grad, float factor, T* logits, const int64_t* targets,      \
                                       float* losses) {                                                         \
    return cross_entropy(threads, rows, width, ignored, with_grad, factor, logits, targets, losses);            \
  }

EXPORT(fp32, float)
EXPORT(bf16, at::BFloat16)
