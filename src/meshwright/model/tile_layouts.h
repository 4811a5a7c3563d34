// Rows of a tensor laid out as an operand of oneDNN's brgemm: A, rows as they stand, or B, "packed": in formats of
// 16 bits the numbers of two rows lie side by side. Either of the rows themselves or of their transpose.

#pragma once

#include <immintrin.h>

#include <algorithm>

#include "cpu_kernels.h"

namespace meshwright {

// Rows (count, width) of `stride` as A, with zeros up to `all` rows.
template <typename P, typename T>
void copy_rows(P* to, const T* from, int64_t count, int64_t all, int64_t width, int64_t stride) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < width; ++j) to[i * width + j] = cast<P>(from[i * stride + j]);
  std::memset(static_cast<void*>(to + count * width), 0, (all - count) * width * sizeof(P));
}

// They as B (all, width); `all` is even for 16 bits.
template <typename P, typename T>
void pack_rows(P* to, const T* from, int64_t count, int64_t all, int64_t width, int64_t stride) {
  if constexpr (sizeof(P) == 4) return copy_rows(to, from, count, all, width, stride);
  const int64_t whole = count / 2 * 2;
  for (int64_t i = 0; i < whole; i += 2) {
    const T *even = from + i * stride, *odd = even + stride;
    P* line = to + i * width;
    for (int64_t j = 0; j < width; ++j) {
      line[2 * j] = cast<P>(even[j]);
      line[2 * j + 1] = cast<P>(odd[j]);
    }
  }
  std::memset(static_cast<void*>(to + whole * width), 0, (all - whole) * width * sizeof(P));
  for (int64_t j = 0; whole < count && j < width; ++j) to[whole * width + 2 * j] = cast<P>(from[whole * stride + j]);
}

constexpr int64_t SIDE = 8;

// Transpose a square of SIDE^2 units of 32 bits.
inline void transpose(uint32_t (*square)[SIDE]) {
  __m256i a[SIDE], b[SIDE];
  for (int64_t i = 0; i < SIDE; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(square[i]));
  for (int64_t i = 0; i < SIDE; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int64_t i = 0; i < SIDE; i += 4)
    for (int64_t half = 0; half < 2; ++half) {
      a[i + 2 * half] = _mm256_unpacklo_epi64(b[i + half], b[i + half + 2]);
      a[i + 2 * half + 1] = _mm256_unpackhi_epi64(b[i + half], b[i + half + 2]);
    }
  for (int64_t i = 0; i < SIDE / 2; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(square[i]), _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(square[i + 4]), _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
  }
}

// Numbers as bytes of units, `count` of them at most.
template <typename P, typename T>
[[gnu::always_inline]] inline void read_units(uint32_t (&units)[SIDE], const T* from, int64_t count) {
  if constexpr (std::is_same_v<P, T>) {
    std::memcpy(units, from, count * sizeof(P));
  } else {
    P numbers[sizeof units / sizeof(P)];
    for (int64_t j = 0; j < count; ++j) numbers[j] = cast<P>(from[j]);
    std::memcpy(units, numbers, count * sizeof(P));
  }
}

// Call `put(j, i, units)` for each SIDE rows from i on, with zeros for those from `count` on, and each unit of their
// columns: column j, or j and j + 1 in 16 bits. `all` is a multiple of SIDE, and `width` even for 16 bits.
template <typename P, typename T, typename Put>
void transposed(const T* from, int64_t count, int64_t all, int64_t width, int64_t stride, const Put& put) {
  constexpr int64_t in_unit = sizeof(uint32_t) / sizeof(P), wide = SIDE * in_unit;
  for (int64_t i = 0; i < all; i += SIDE)
    for (int64_t first = 0; first < width; first += wide) {
      const T* rows = from + i * stride + first;
      uint32_t square[SIDE][SIDE];
      if (i + SIDE <= count && first + wide <= width) {
        for (int64_t r = 0; r < SIDE; ++r) read_units<P>(square[r], rows + r * stride, wide);
      } else {
        std::memset(square, 0, sizeof square);
        for (int64_t r = 0; r < std::min(SIDE, count - i); ++r)
          read_units<P>(square[r], rows + r * stride, std::min(wide, width - first));
      }
      transpose(square);
      for (int64_t j = 0; j < std::min(wide, width - first); j += in_unit) put(first + j, i, square[j / in_unit]);
    }
}

// Their transpose (width, all) as A.
template <typename P, typename T>
void copy_columns(P* to, const T* from, int64_t count, int64_t all, int64_t width, int64_t stride) {
  transposed<P>(from, count, all, width, stride, [&](int64_t j, int64_t i, const uint32_t* units) {
    if constexpr (sizeof(P) == 4) {
      std::memcpy(to + j * all + i, units, SIDE * sizeof(P));
    } else {
      uint16_t columns[2][SIDE];
      for (int64_t r = 0; r < SIDE; ++r) columns[0][r] = units[r], columns[1][r] = units[r] >> 16;
      for (int64_t half = 0; half < 2; ++half) std::memcpy(to + (j + half) * all + i, columns[half], sizeof columns[0]);
    }
  });
}

// Their transpose (width, all) as B.
template <typename P, typename T>
void pack_columns(P* to, const T* from, int64_t count, int64_t all, int64_t width, int64_t stride) {
  if constexpr (sizeof(P) == 4) return copy_columns(to, from, count, all, width, stride);
  transposed<P>(from, count, all, width, stride, [&](int64_t j, int64_t i, const uint32_t* units) {
    std::memcpy(to + j * all + 2 * i, units, SIDE * sizeof(uint32_t));
  });
}

}  // namespace meshwright
