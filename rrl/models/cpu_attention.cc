// Attention of new tokens to a cache of keys and values, on one core of a processor (see cpu_attention.py).
//
// A block's keys and values are read once, where they lie, by all queries of a key head, whose scores stay in the nearest caches.
// A query's numbers are summed in an order that nothing but its own position decides.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Numbers of a vector register, and how many registers hold sums while others hold what is multiplied.
#ifdef __AVX512F__
constexpr int kLanes = 16, kSums = 16;
#else
constexpr int kLanes = 8, kSums = 8;
#endif
// So many registers go through a polynomial together, and so many queries through a block.
constexpr int64_t kTogether = 4, kStride = kTogether * kLanes, kQueries = 16;
constexpr float kLowest = std::numeric_limits<float>::lowest();
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

inline Lanes all(float x) { return Lanes{} + x; }

// The first where one of them is not a number.
inline Lanes larger(Lanes x, Lanes y) { return x < y ? y : x; }

// 2^x of numbers that are not above 0: 2^n 2^r with |r| <= 1/2, and for 2^r a polynomial that was fitted to the least relative
// error (2e-9).
template <int count>
inline void power_of_two(Lanes (&x)[count]) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: a sum with it is a whole number
  const float polynomial[] = {0.00133989012f, 0.00961843763f, 0.0555033241f, 0.240226479f, 0.693147203f, 1.0f};
  Lanes whole[count], y[count];
  for (int i = 0; i < count; ++i) x[i] = larger(x[i], all(-126.0f));
  for (int i = 0; i < count; ++i) whole[i] = x[i] + magic;
  for (int i = 0; i < count; ++i) x[i] -= whole[i] - magic;
  for (int i = 0; i < count; ++i) y[i] = all(0.000153533383f);
  for (float coefficient : polynomial)
    for (int i = 0; i < count; ++i) y[i] = y[i] * x[i] + coefficient;
  for (int i = 0; i < count; ++i) {
    Ints bits, exponent;
    std::memcpy(&bits, &y[i], sizeof bits);
    std::memcpy(&exponent, &whole[i], sizeof exponent);
    bits += exponent << 23;
    std::memcpy(&x[i], &bits, sizeof bits);
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

struct Matrix {
  const float* first;
  int64_t step;
};

// out[q][c] = scale[q] out[q][c] + sum over i of x[q][i] y[i][c], without the first where there is no scale, for `rows` q and
// columns * kLanes c.
template <int rows, int columns>
inline void tile(Matrix x, Matrix y, int64_t inner, const float* scale, float* out, int64_t step) {
  Lanes sum[rows][columns];
  for (int q = 0; q < rows; ++q)
    for (int c = 0; c < columns; ++c)
      sum[q][c] = scale ? load(out + q * step + c * kLanes) * scale[q] : Lanes{};
  for (int64_t i = 0; i < inner; ++i) {
    Lanes right[columns];
    for (int c = 0; c < columns; ++c) right[c] = load(y.first + i * y.step + c * kLanes);
    for (int q = 0; q < rows; ++q)
      for (int c = 0; c < columns; ++c) sum[q][c] += x.first[q * x.step + i] * right[c];
  }
  for (int q = 0; q < rows; ++q)
    for (int c = 0; c < columns; ++c) store(out + q * step + c * kLanes, sum[q][c]);
}

// The same for `rows` q and any width that is a multiple of kLanes.
template <int rows>
inline void band(Matrix x, Matrix y, int64_t inner, int64_t width, const float* scale, float* out, int64_t step) {
  constexpr int columns = kSums / rows < 4 ? kSums / rows : 4;
  int64_t c = 0;
  for (; c + columns * kLanes <= width; c += columns * kLanes)
    tile<rows, columns>(x, {y.first + c, y.step}, inner, scale, out + c, step);
  if constexpr (columns > 2)  // or the sums of a narrow head would wait for one another
    for (; c + 2 * kLanes <= width; c += 2 * kLanes) tile<rows, 2>(x, {y.first + c, y.step}, inner, scale, out + c, step);
  for (; c < width; c += kLanes) tile<rows, 1>(x, {y.first + c, y.step}, inner, scale, out + c, step);
}

// The same for any number of rows: as many as fill the registers at a time, then fewer. Each number is summed from the first i to
// the last, whatever the shapes.
template <int rows>
void multiply(Matrix x, Matrix y, int64_t count, int64_t inner, int64_t width, const float* scale, float* out,
              int64_t step) {
  int64_t q = 0;
  for (; q + rows <= count; q += rows)
    band<rows>({x.first + q * x.step, x.step}, y, inner, width, scale ? scale + q : nullptr, out + q * step, step);
  if constexpr (rows > 1)
    if (q < count)
      multiply<rows / 2>({x.first + q * x.step, x.step}, y, count - q, inner, width, scale ? scale + q : nullptr,
                         out + q * step, step);
}

// The queries of one entry and key head, and what they have read so far.
class Reader {
 public:
  Reader(int64_t most, int64_t width) : width_(width), most_((most + kLanes - 1) / kLanes * kLanes), seen_(most) {
    room_.resize(most_ * (2 * width + kLanes + 2) / kLanes);
    queries_ = reinterpret_cast<float*>(room_.data());
    mixed_ = queries_ + most_ * width;
    total_ = mixed_ + most_ * width;
    peak_ = total_ + most_ * kLanes;
    shrink_ = peak_ + most_;
    begin();
  }

  Reader(Reader&&) = default;  // a copy would write where the other does

  void begin() {
    std::fill(room_.begin(), room_.end(), Lanes{});
    std::fill_n(peak_, most_, kLowest);
    places_.clear();
    longest_ = 0;
  }

  // A query that sees the first `slots` of its row, and where what it finds is to be.
  void add(const float* query, int64_t slots, float* out) {
    const int64_t m = places_.size();
    for (int64_t c = 0; c < width_; ++c) queries_[m * width_ + c] = query[c] * kLog2e;
    seen_[m] = slots;
    places_.push_back(out);
    longest_ = std::max(longest_, slots);
  }

  int64_t longest() const { return longest_; }

  // A block whose first slot is `first`, by a few queries at a time, whose scores stay near: `scores` is room for them.
  void read(const float* keys, const float* values, int64_t first, int64_t block, float* scores) {
    const int64_t here = std::min(block, (longest_ - first + kStride - 1) / kStride * kStride), count = places_.size();
    for (int64_t begin = 0; begin < count; begin += kQueries)
      read(begin, std::min(begin + kQueries, count), keys, values, first, here, block, scores);
  }

  void end() const {
    for (size_t m = 0; m < places_.size(); ++m) {
      float sum = 0;
      for (int i = 0; i < kLanes; ++i) sum += total_[m * kLanes + i];
      for (int64_t c = 0; c < width_; ++c) places_[m][c] = mixed_[m * width_ + c] / sum;
    }
  }

 private:
  // A running softmax (Milakov & Gimelshein 2018) of queries from `begin` on over `here` slots.
  void read(int64_t begin, int64_t end, const float* keys, const float* values, int64_t first, int64_t here,
            int64_t block, float* scores) {
    const int64_t count = end - begin;
    multiply<kSums / 4>({queries_ + begin * width_, width_}, {keys, block}, count, width_, here, nullptr, scores, block);
    float *peak = peak_ + begin, *shrink = shrink_ + begin, *total = total_ + begin * kLanes;
    for (int64_t m = 0; m < count; ++m) {
      float* score = scores + m * block;
      const int64_t own = std::max<int64_t>(seen_[begin + m] - first, 0);
      if (own < here) std::fill(score + own, score + here, kLowest);
      Lanes high = load(score);
      for (int64_t s = kLanes; s < here; s += kLanes) high = larger(high, load(score + s));
      const float before = peak[m];
      peak[m] = largest_of<kLanes>(larger(high, all(before)));
      shrink[m] = before - peak[m];
    }
    for (int64_t m = 0; m < count; m += kLanes) {
      Lanes x[] = {load(shrink + m)};
      power_of_two(x);
      store(shrink + m, x[0]);
    }
    for (int64_t m = 0; m < count; ++m) {
      float* score = scores + m * block;
      const int64_t own = std::max<int64_t>(seen_[begin + m] - first, 0);
      const Lanes highest = all(peak[m]);
      Lanes sum = load(total + m * kLanes) * shrink[m];
      for (int64_t s = 0; s < here; s += kStride) {
        Lanes x[kTogether];
        for (int i = 0; i < kTogether; ++i) x[i] = load(score + s + i * kLanes) - highest;
        power_of_two(x);
        for (int i = 0; i < kTogether; ++i) store(score + s + i * kLanes, x[i]);
        if (own < s + kStride) {  // what is not seen weighs nothing at all
          std::fill(score + std::max(own, s), score + s + kStride, 0.0f);
          for (int i = 0; i < kTogether; ++i) x[i] = load(score + s + i * kLanes);
        }
        sum += (x[0] + x[1]) + (x[2] + x[3]);
      }
      store(total + m * kLanes, sum);
    }
    multiply<kSums / 2>({scores, block}, {values, width_}, count, here, width_, shrink, mixed_ + begin * width_, width_);
  }

  int64_t width_, most_, longest_;
  std::vector<Lanes> room_;  // begins where a cache line does
  float *queries_, *mixed_, *total_, *peak_, *shrink_;
  std::vector<int64_t> seen_;
  std::vector<float*> places_;
};

ffi::Error Attend(ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> layer,
                  ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> rows, int32_t slots,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto asked = q.dimensions(), held = v.dimensions();
  const int64_t entries = asked[0], time = asked[1], heads = asked[2], width = asked[3];
  const int64_t blocks = held[1], all_rows = held[2], kv_heads = held[3], block = held[4];
  const int64_t group = heads / kv_heads;
  const int32_t *at = positions.typed_data(), *row_of = rows.typed_data();

  std::vector<int64_t> order(entries);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return row_of[x] < row_of[y]; });
  std::vector<Lanes> scores(kQueries * block / kLanes);
  std::vector<Reader> readers;

  for (int64_t begin = 0, end; begin < entries; begin = end) {
    // Entries of one row read a block one after another, while it is near.
    const int64_t row = row_of[order[begin]];
    for (end = begin; end < entries && row_of[order[end]] == row;) ++end;
    while (static_cast<int64_t>(readers.size()) < end - begin) readers.emplace_back(time * group, width);
    for (int64_t head = 0; head < kv_heads; ++head) {
      int64_t longest = 0;
      for (int64_t i = begin; i < end; ++i) {
        Reader& reader = readers[i - begin];
        reader.begin();
        for (int64_t t = 0; t < time; ++t) {
          const int64_t place = order[i] * time + t;
          for (int64_t g = 0; g < group; ++g) {
            const int64_t offset = (place * heads + head * group + g) * width;
            float* found = out->typed_data() + offset;
            if (0 <= at[place] && at[place] < slots && 0 <= row && row < all_rows)
              reader.add(q.typed_data() + offset, at[place] + 1, found);
            else
              std::fill_n(found, width, 0.0f);
          }
        }
        longest = std::max(longest, reader.longest());
      }
      for (int64_t first = 0; first < longest; first += block) {
        const int64_t number = ((layer.typed_data()[0] * blocks + first / block) * all_rows + row) * kv_heads + head;
        const float *keys = k.typed_data() + number * block * width, *values = v.typed_data() + number * block * width;
        for (int64_t i = 0; i < end - begin; ++i)
          if (first < readers[i].longest())
            readers[i].read(keys, values, first, block, reinterpret_cast<float*>(scores.data()));
      }
      for (int64_t i = 0; i < end - begin; ++i) readers[i].end();
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_cache_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<int32_t>("slots")
                                  .Ret<ffi::Buffer<ffi::F32>>());
