// Matrices laid out as operands of oneDNN's brgemm: as A, row by row, or as B, "packed", where in formats of 16 bits
// the numbers of two rows lie side by side.
//
// All functions read `count` rows of `width` numbers, `stride` apart, and take zeros for rows from there to `all`.
// T is the format that is read, P the one that is written.

#pragma once

#include <immintrin.h>

#include <algorithm>

#include "cpu_kernels.h"

namespace meshwright {

// The rows as A, (all, width).
template <typename P, typename T>
void copy_rows(P* to, const T* from, int64_t count, int64_t all, int64_t width, int64_t stride) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < width; ++j) to[i * width + j] = cast<P>(from[i * stride + j]);
  std::memset(static_cast<void*>(to + count * width), 0, (all - count) * width * sizeof(P));
}

// The rows as B, (all, width); `all` is even for 16 bits.
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

constexpr int64_t SIDE = 8;  // units of 32 bits in a vector of AVX2

// Transpose a square of SIDE^2 units.
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

// Fill units with `count` numbers, as many as they hold or fewer.
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

// Call `put(j, i, units)` for each column j and each i that divides by SIDE: units are the column's numbers in rows i
// to i + SIDE, in 16 bits each beside that of column j + 1, and j is even. `all` divides by SIDE, and `width` by 2 for
// 16 bits.
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

// The transpose of the rows as A, (width, all).
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

// The transpose of the rows as B, (width, all).
template <typename P, typename T>
void pack_columns(P* to, const T* from, int64_t count, int64_t all, int64_t width, int64_t stride) {
  if constexpr (sizeof(P) == 4) return copy_columns(to, from, count, all, width, stride);
  transposed<P>(from, count, all, width, stride, [&](int64_t j, int64_t i, const uint32_t* units) {
    std::memcpy(to + j * all + 2 * i, units, SIDE * sizeof(uint32_t));
  });
}

}  // namespace meshwright
