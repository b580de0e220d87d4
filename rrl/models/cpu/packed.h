// Weight matrices in packed formats, and products with them.
//
// A word has 32 bits: one float32, two bfloat16 or four int8, which multiply consecutive inputs. A panel has the words of kLanes
// columns, [inputs per column / numbers per word][kLanes], so that a product reads contiguous memory. A matrix [inner, width] is
// width / kLanes panels. In int8 it is followed by the scale (float32) and the sum (int32) of each column.

#ifndef RRL_MODELS_CPU_PACKED_H_
#define RRL_MODELS_CPU_PACKED_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "products.h"

namespace {

// The order of rrl.models.cpu.packed.FORMATS.
enum Format : int32_t { kRowMajor, kFloat32, kBFloat16, kInt8 };

// A weight matrix [inner, width]: float32 in row-major order, or packed.
struct Weight {
  Format format;
  const void* data;
};

// Inputs of a product as words, and the scale of each row (int8 only).
struct Inputs {
  const int32_t* words;
  const float* scales;
};

// -- What differs between the packed formats ----------------------------------------------------------------------------------
//
// Sum: a register of kLanes sums. Words: a register of kLanes words of weights. kPerWord: numbers per word. kScaled: whether the
// numbers have scales; then sums are integers. add_product: adds the products of one word of inputs with the words of kLanes
// columns. convert: a row of `count` inputs to words, and its scale. pack: kPerWord rows of kLanes weights to words; `inverse` is
// 1 / scale, if kScaled.

struct Float32 {
  static constexpr int64_t kPerWord = 1;
  static constexpr bool kScaled = false;
  typedef Lanes Sum;
  typedef Lanes Words;

  static Words words(const int32_t* from) { return load(reinterpret_cast<const float*>(from)); }
  static void add_product(Sum& sum, const int32_t* x, Words y) { sum += *reinterpret_cast<const float*>(x) * y; }
  static void convert(const float* x, int64_t count, int32_t* out, float*) { std::memcpy(out, x, 4 * count); }
  static Ints pack(const Lanes* x, Lanes) { return (Ints)x[0]; }
};

#ifdef __AVX512BF16__
struct BFloat16 {
  static constexpr int64_t kPerWord = 2;
  static constexpr bool kScaled = false;
  typedef Lanes Sum;
  typedef __m512bh Words;

  static Words words(const int32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static void add_product(Sum& sum, const int32_t* x, Words y) {
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*x), y);
  }
  static void convert(const float* x, int64_t count, int32_t* out, float*) {
    for (int64_t c = 0; c < count; c += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(out) + c),
                          (__m256i)_mm512_cvtneps_pbh((__m512)load(x + c)));
  }
  static Ints pack(const Lanes* x, Lanes) {
    const auto rounded = [](Lanes y) { return (Ints)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)y)); };
    return rounded(x[0]) | rounded(x[1]) << 16;
  }
};
#endif

#ifdef __AVX512VNNI__
// Symmetric int8 with one scale per column of the weights and one per row of the inputs. The instruction multiplies unsigned with
// signed numbers, so inputs are stored plus 128, and 128 times the column's sum is subtracted from the result.
struct Int8 {
  static constexpr int64_t kPerWord = 4;
  static constexpr bool kScaled = true;
  typedef __m512i Sum;
  typedef __m512i Words;

  static Words words(const int32_t* from) { return _mm512_loadu_si512(from); }
  // With the intrinsic, GCC 12 moves the sums to memory and back at each step of the inner loop.
  static void add_product(Sum& sum, const int32_t* x, Words y) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32(*x)), "v"(y));
  }
  // The scale of a row that is not finite is NaN, and so are its products.
  static void convert(const float* x, int64_t count, int32_t* out, float* scale) {
    Lanes high{}, zeros{};
    for (int64_t c = 0; c < count; c += kLanes) {
      const Lanes given = load(x + c);
      high = larger(high, given < 0 ? -given : given);
      zeros += given * 0;
    }
    const float highest = largest_of<kLanes>(high);
    bool finite = true;
    for (int i = 0; i < kLanes; ++i) finite &= zeros[i] == 0;
    *scale = finite ? highest / 127 : std::numeric_limits<float>::quiet_NaN();
    const Lanes inverse = broadcast(finite && highest > 0 ? 127 / highest : 0);
    for (int64_t c = 0; c < count; c += kLanes) {
      const __m512i rounded = _mm512_cvtps_epi32((__m512)(load(x + c) * inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(reinterpret_cast<uint8_t*>(out) + c),
                       _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, _mm512_set1_epi32(128))));
    }
  }
  static Ints pack(const Lanes* x, Lanes inverse) {
    Ints word{};
    for (int i = 0; i < kPerWord; ++i) word |= ((Ints)_mm512_cvtps_epi32((__m512)(x[i] * inverse)) & 0xff) << 8 * i;
    return word;
  }
};
#endif

// Calls body(Number{}) with the type of a packed format; returns false if this CPU lacks its instructions.
template <typename Body>
bool with_format(Format format, const Body& body) {
  if (format == kFloat32) return body(Float32{}), true;
#ifdef __AVX512BF16__
  if (format == kBFloat16) return body(BFloat16{}), true;
#endif
#ifdef __AVX512VNNI__
  if (format == kInt8) return body(Int8{}), true;
#endif
  return false;
}

// -- Packing ------------------------------------------------------------------------------------------------------------------

// Bytes of a packed matrix.
template <typename Number>
int64_t packed_bytes(int64_t inner, int64_t width) {
  return 4 * inner / Number::kPerWord * width + (Number::kScaled ? 8 * width : 0);
}

// kLanes numbers with a distance of `stride`.
inline Lanes load(const float* from, int64_t stride) {
  if (stride == 1) return load(from);
  float numbers[kLanes];
  for (int c = 0; c < kLanes; ++c) numbers[c] = from[c * stride];
  return load(numbers);
}

// Packs a matrix whose number at (i, c) is y[i * inner_stride + c * width_stride].
template <typename Number>
void pack(const float* y, int64_t inner, int64_t width, int64_t inner_stride, int64_t width_stride, uint8_t* out,
          ThreadTeam& team) {
  const int64_t words = inner / Number::kPerWord;
  int32_t* const packed = reinterpret_cast<int32_t*>(out);
  float* const scales = reinterpret_cast<float*>(packed + words * width);
  int32_t* const sums = reinterpret_cast<int32_t*>(scales + width);
  team.each(width / kLanes, [&](int64_t panel) {
    const float* const first = y + panel * kLanes * width_stride;
    Lanes inverse{};
    if constexpr (Number::kScaled) {
      Lanes high{}, zeros{};
      for (int64_t i = 0; i < inner; ++i) {
        const Lanes x = load(first + i * inner_stride, width_stride);
        high = larger(high, x < 0 ? -x : x);
        zeros += x * 0;  // NaN if any number is not finite
      }
      store(scales + panel * kLanes, high / 127 + zeros);
      inverse = high > 0 ? 127 / high : Lanes{};
    }
    Ints total{};
    for (int64_t i = 0; i < words; ++i) {
      Lanes x[Number::kPerWord];
      for (int j = 0; j < Number::kPerWord; ++j)
        x[j] = load(first + (i * Number::kPerWord + j) * inner_stride, width_stride);
      const Ints word = Number::pack(x, inverse);
      std::memcpy(packed + (panel * words + i) * kLanes, &word, sizeof word);
      if constexpr (Number::kScaled)
        for (int j = 0; j < Number::kPerWord; ++j) total += word << (24 - 8 * j) >> 24;  // sign extension of each int8
    }
    if constexpr (Number::kScaled) std::memcpy(sums + panel * kLanes, &total, sizeof total);
  });
}

// -- Products -----------------------------------------------------------------------------------------------------------------

// out = x y, or out += x y with `added`, for `rows` rows and `panels` panels. `scales` and `sums` are those of the columns.
template <typename Number, int rows, int panels>
inline void packed_tile(Inputs x, const int32_t* y, int64_t words, const float* scales, const int32_t* sums, bool added,
                        float* out, int64_t step) {
  typename Number::Sum sum[rows][panels] = {};
  for (int64_t i = 0; i < words; ++i) {
    typename Number::Words right[panels];
#pragma GCC unroll 8
    for (int p = 0; p < panels; ++p) right[p] = Number::words(y + (p * words + i) * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < rows; ++q)
#pragma GCC unroll 8
      for (int p = 0; p < panels; ++p) Number::add_product(sum[q][p], x.words + q * words + i, right[p]);
  }
#pragma GCC unroll 8
  for (int q = 0; q < rows; ++q)
#pragma GCC unroll 8
    for (int p = 0; p < panels; ++p) {
      Lanes result;
      if constexpr (Number::kScaled) {
        Ints column_sums;
        std::memcpy(&column_sums, sums + p * kLanes, sizeof column_sums);
        const Ints signed_sums = (Ints)sum[q][p] - 128 * column_sums;
        result = __builtin_convertvector(signed_sums, Lanes) * load(scales + p * kLanes) * x.scales[q];
        // Otherwise some tiles would contract the last product and the sum below to one operation, which rounds once.
        asm("" : "+x"(result));
      } else {
        result = sum[q][p];
      }
      float* const to = out + q * step + p * kLanes;
      store(to, added ? load(to) + result : result);
    }
}

// Like `packed_tile`, for any number of rows.
template <typename Number, int rows, int panels>
void packed_rows(Inputs x, int64_t count, const int32_t* y, int64_t words, const float* scales, const int32_t* sums, bool added,
                 float* out, int64_t step) {
  int64_t q = 0;
  for (; q + rows <= count; q += rows)
    packed_tile<Number, rows, panels>({x.words + q * words, x.scales + q}, y, words, scales, sums, added, out + q * step, step);
  if constexpr (rows > 1)
    if (q < count)
      packed_rows<Number, rows / 2, panels>({x.words + q * words, x.scales + q}, count - q, y, words, scales, sums, added,
                                            out + q * step, step);
}

// Like `packed_rows`, for any number of panels up to `panels`.
template <typename Number, int panels>
void packed_panels(int64_t panel_count, Inputs x, int64_t count, const int32_t* y, int64_t words, const float* scales,
                   const int32_t* sums, bool added, float* out, int64_t step) {
  if (panel_count == panels)
    packed_rows<Number, kRows, panels>(x, count, y, words, scales, sums, added, out, step);
  else if constexpr (panels > 1)
    packed_panels<Number, panels - 1>(panel_count, x, count, y, words, scales, sums, added, out, step);
}

template <typename Number>
void packed_product(const float* x, const void* y, int64_t count, int64_t inner, int64_t width, float* out, ThreadTeam& team,
                    bool added) {
  constexpr int64_t kPanels = kSums / kRows;
  const int64_t words = inner / Number::kPerWord, panels = width / kLanes;
  const int32_t* const weights = static_cast<const int32_t*>(y);
  const float* const scales = reinterpret_cast<const float*>(weights + words * width);
  const int32_t* const sums = reinterpret_cast<const int32_t*>(scales + width);
  std::vector<int32_t> converted(count * words);
  std::vector<float> row_scales(count);
  const bool parallel = count * inner * width >= kMinThreadedWork;
  team.each(
      count, [&](int64_t row) { Number::convert(x + row * inner, inner, converted.data() + row * words, &row_scales[row]); },
      parallel && count * inner >= kLargeMatrix);
  team.each(
      (panels + kPanels - 1) / kPanels,
      [&](int64_t number) {
        const int64_t first = number * kPanels, column = first * kLanes;
        packed_panels<Number, kPanels>(std::min(kPanels, panels - first), {converted.data(), row_scales.data()}, count,
                                       weights + first * words * kLanes, words, scales + column, sums + column, added,
                                       out + column, width);
      },
      parallel);
}

// `product` (products.h) with a weight of any format that `with_format` supports.
void product(const float* x, Weight y, int64_t count, int64_t inner, int64_t width, float* out, ThreadTeam& team,
             bool added = false) {
  if (y.format == kRowMajor) return product(x, static_cast<const float*>(y.data), count, inner, width, out, team, added);
  with_format(y.format, [&](auto number) {
    packed_product<decltype(number)>(x, y.data, count, inner, width, out, team, added);
  });
}

}  // namespace

#endif  // RRL_MODELS_CPU_PACKED_H_
