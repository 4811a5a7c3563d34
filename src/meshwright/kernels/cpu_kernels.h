// What kernels for x86 processors share: formats, and functions that compilers vectorise.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace meshwright {

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T), ALIGN))) {}
  operator T*() const { return data_.get(); }

 private:
  static constexpr std::align_val_t ALIGN{64};
  struct Free {
    void operator()(void* data) const { ::operator delete(data, ALIGN); }
  };
  std::unique_ptr<T, Free> data_;
};

template <typename P, typename T>
inline P cast(T x) {
  if constexpr (std::is_same_v<P, T>) {
    return x;
  } else if constexpr (std::is_same_v<P, float>) {
    return static_cast<float>(x);
  } else if constexpr (std::is_same_v<P, at::BFloat16> && std::is_same_v<T, float>) {
    uint32_t bits;  // round to nearest, ties to even, without a branch
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return at::BFloat16(static_cast<uint16_t>(x != x ? 0x7fc0u : rounded), at::BFloat16::from_bits());
  } else {
    return static_cast<P>(static_cast<float>(x));
  }
}

// exp(x) of x <= 0, or a little more, within 2 ulp; 0 below -87, not finite far above 0, and NaN stays NaN.
// Polynomial of Cephes' expf (Moshier 1992). The power of two comes from a sum that is so large that its last bits
// are the integer nearest to x / log(2), plus the exponent's bias.
inline float exponential(float x) {
  constexpr float LARGE = 12582912.0f + 127.0f;  // 1.5 * 2^23
  const float shifted = std::fma(x, 1.44269504f, LARGE), n = shifted - LARGE;
  const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
  float y = 1.9875691500e-4f;
  y = std::fma(y, r, 1.3981999507e-3f);
  y = std::fma(y, r, 8.3334519073e-3f);
  y = std::fma(y, r, 4.1665795894e-2f);
  y = std::fma(y, r, 1.6666665459e-1f);
  y = std::fma(y, r, 5.0000001201e-1f);
  y = std::fma(y, r * r, r + 1.0f);
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  y = x < -87.0f ? 0.0f : y * power;
  return x > 88.0f ? x * 1e38f : y;
}

// tanh(x) within some ulp: its series near 0, where 1 - 2 / (e^2x + 1) would cancel.
inline float hyperbolic_tangent(float x) {
  const float square = x * x, bounded = std::fabs(x) > 9.0f ? 9.0f : std::fabs(x);
  float series = 62.0f / 2835.0f;
  series = std::fma(series, square, -17.0f / 315.0f);
  series = std::fma(series, square, 2.0f / 15.0f);
  series = std::fma(series, square, -1.0f / 3.0f);
  series = std::fma(series * square, x, x);
  const float far = 1.0f - 2.0f / (exponential(2.0f * bounded) + 1.0f);
  return std::fabs(x) < 0.3f ? series : std::copysign(far, x);
}

}  // namespace meshwright
