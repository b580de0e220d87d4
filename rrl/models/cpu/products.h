// Building blocks of the CPU kernels: vector registers, powers of two, matrix products, and threads.

#ifndef RRL_MODELS_CPU_PRODUCTS_H_
#define RRL_MODELS_CPU_PRODUCTS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// kLanes: floats per vector register. kSums: registers that hold the sums of a matrix product's tile. kRows: maximum number of
// rows of a tile.
#ifdef __AVX512F__
constexpr int kLanes = 16, kSums = 24, kRows = 8;
#else
constexpr int kLanes = 8, kSums = 8, kRows = 4;
#endif
// `product` computes all rows for this many columns, then goes to the next columns. If it copies the columns (see there), it
// takes as many as one tile has.
constexpr int64_t kPanelColumns = 6 * kLanes;
// A matrix of at least this many numbers does not fit in a core's caches.
constexpr int64_t kLargeMatrix = 1 << 18;
// A matrix product of at least this many multiplications uses several threads.
constexpr int64_t kMinThreadedWork = 1 << 20;
constexpr float kLog2e = 1.44269504f;

template <int count>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * count)));
};
typedef Vector<kLanes>::Floats Lanes;
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* from) {
  Lanes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

// A register with x in all lanes.
inline Lanes broadcast(float x) { return Lanes{} + x; }

// Elementwise maximum; x where x or y is NaN.
inline Lanes larger(Lanes x, Lanes y) { return x < y ? y : x; }

// 2^x for -126 <= x <= 0, and 2^-126 for x below -126. Computed as 2^n 2^r with |r| <= 1/2. 2^r is a minimax polynomial with a
// relative error of 2e-9.
template <int count>
inline void power_of_two(Lanes (&x)[count]) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float polynomial[] = {0.00133989012f, 0.00961843763f, 0.0555033241f, 0.240226479f, 0.693147203f, 1.0f};
  Lanes whole[count], y[count];
  for (int i = 0; i < count; ++i) x[i] = larger(x[i], broadcast(-126.0f));
  for (int i = 0; i < count; ++i) whole[i] = x[i] + magic;
  for (int i = 0; i < count; ++i) x[i] -= whole[i] - magic;
  for (int i = 0; i < count; ++i) y[i] = broadcast(0.000153533383f);
  for (float coefficient : polynomial)
    for (int i = 0; i < count; ++i) y[i] = y[i] * x[i] + coefficient;
  for (int i = 0; i < count; ++i) {
    Ints bits, exponent;
    std::memcpy(&bits, &y[i], sizeof bits);
    std::memcpy(&exponent, &whole[i], sizeof exponent);
    bits += exponent << 23;
    std::memcpy(&y[i], &bits, sizeof bits);
    x[i] = x[i] == x[i] ? y[i] : x[i];  // keeps NaN
  }
}

template <int count>
inline float largest_of(typename Vector<count>::Floats x) {
  if constexpr (count == 1) {
    return x[0];
  } else {
    typename Vector<count / 2>::Floats halves[2];
    std::memcpy(halves, &x, sizeof x);
    return largest_of<count / 2>(halves[0] < halves[1] ? halves[1] : halves[0]);
  }
}

// A row-major matrix; `stride` is the distance between the starts of two rows.
struct Matrix {
  const float* data;
  int64_t stride;
};

// out[q][c] = scale[q] out[q][c] + sum over i of x[q][i] y[i][c], for `rows` values of q and columns * kLanes values of c.
// Without `scale` the first term is omitted. `step` is the row stride of out.
template <int rows, int columns>
inline void tile(Matrix x, Matrix y, int64_t inner, const float* scale, float* out, int64_t step) {
  Lanes sum[rows][columns];
#pragma GCC unroll 8
  for (int q = 0; q < rows; ++q)
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) sum[q][c] = scale ? load(out + q * step + c * kLanes) * scale[q] : Lanes{};
  for (int64_t i = 0; i < inner; ++i) {
    Lanes right[columns];
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) right[c] = load(y.data + i * y.stride + c * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < rows; ++q)
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) sum[q][c] += x.data[q * x.stride + i] * right[c];
  }
#pragma GCC unroll 8
  for (int q = 0; q < rows; ++q)
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) store(out + q * step + c * kLanes, sum[q][c]);
}

// Like `tile`, for any width that is a multiple of kLanes.
template <int rows, int columns>
inline void band(Matrix x, Matrix y, int64_t inner, int64_t width, const float* scale, float* out, int64_t step) {
  int64_t c = 0;
  for (; c + columns * kLanes <= width; c += columns * kLanes)
    tile<rows, columns>(x, {y.data + c, y.stride}, inner, scale, out + c, step);
  if constexpr (columns > 1)
    if (c < width) band<rows, columns - 1>(x, {y.data + c, y.stride}, inner, width - c, scale, out + c, step);
}

// Like `band`, for any number of rows. Each result is summed over i in ascending order, whatever the shapes.
template <int rows>
void multiply(Matrix x, Matrix y, int64_t count, int64_t inner, int64_t width, const float* scale, float* out, int64_t step) {
  int64_t q = 0;
  for (; q + rows <= count; q += rows)
    band<rows, std::min(kSums / rows, 4)>({x.data + q * x.stride, x.stride}, y, inner, width, scale ? scale + q : nullptr,
                                          out + q * step, step);
  if constexpr (rows > 1)
    if (q < count)
      multiply<rows / 2>({x.data + q * x.stride, x.stride}, y, count - q, inner, width, scale ? scale + q : nullptr,
                         out + q * step, step);
}

// This thread and further threads of XLA's pool.
class ThreadTeam {
 public:
  ThreadTeam(ffi::ThreadPool pool, int64_t threads) : pool_(pool), threads_(threads) {}

  // Calls body(0), ..., body(count - 1) in any order, on several threads if `parallel`. A thread that starts after all calls have
  // begun does not touch the body, which may no longer exist.
  template <typename Body>
  void each(int64_t count, const Body& body, bool parallel = true) {
    struct Progress {
      std::atomic<int64_t> started{0}, done{0};
    };
    const int64_t helpers = parallel ? std::min(threads_, count) - 1 : 0;
    if (helpers <= 0) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    const auto progress = std::make_shared<Progress>();
    const auto work = [progress, count, body = &body] {
      for (int64_t i; (i = progress->started++) < count; ++progress->done) (*body)(i);
    };
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([work] { work(); });
    work();
    while (progress->done < count) std::this_thread::yield();
  }

 private:
  ffi::ThreadPool pool_;
  int64_t threads_;
};

// out = x y, or out += x y with `added`; x is [count, inner], y is [inner, width]. If y is large and x has many rows, columns
// of y are first copied into contiguous memory. This is not one of the packed formats of packed.h.
void product(const float* x, const float* y, int64_t count, int64_t inner, int64_t width, float* out, ThreadTeam& team,
             bool added = false) {
  const bool packed = count > kRows && inner * width >= kLargeMatrix;
  const int64_t columns = packed ? kSums / kRows * kLanes : kPanelColumns;
  const std::vector<float> ones(added ? count : 0, 1.0f);
  const auto panel = [&](int64_t number) {
    const int64_t first = number * columns, panel_width = std::min(columns, width - first);
    Matrix right = {y + first, width};
    thread_local std::vector<Lanes> buffer;
    if (packed) {
      buffer.resize(inner * panel_width / kLanes);
      float* copy = reinterpret_cast<float*>(buffer.data());
      for (int64_t i = 0; i < inner; ++i) std::copy_n(y + i * width + first, panel_width, copy + i * panel_width);
      right = {copy, panel_width};
    }
    multiply<kRows>({x, inner}, right, count, inner, panel_width, added ? ones.data() : nullptr, out + first, width);
  };
  team.each((width + columns - 1) / columns, panel, count * inner * width >= kMinThreadedWork);
}

}  // namespace

#endif  // RRL_MODELS_CPU_PRODUCTS_H_
