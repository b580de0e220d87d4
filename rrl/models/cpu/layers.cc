// CPU kernels for generation (see layers.py): decoder layers over a key-value cache, cache attention, token sampling, and
// copies of cache rows.
//
// Weights and cache are read in place. All queries of a key head read a block's keys and values together, and their scores stay
// in the CPU's L1 and L2 caches. The order of each sum depends only on the token's own position.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "products.h"

namespace {

// The softmax computes the exponentials of this many registers, and so of this many scores, at a time.
constexpr int64_t kExpRegisters = 4, kExpScores = kExpRegisters * kLanes;
// Number of queries whose scores with a block are in memory at a time.
constexpr int64_t kQueryTile = 16;
// Number of tokens per pass through a layer; four times as many if its weights are large.
constexpr int64_t kChunkTokens = 64;
// Maximum number of tokens in a QueryGroup.
constexpr int64_t kGroupTokens = 32;
// To find the sampled token, the weights of this many vocabulary entries are summed at a time.
constexpr int64_t kSumBlock = 128;
// Top-p sums the weights of this many vocabulary entries in float32 before it adds them to a double.
constexpr int64_t kTopPBlock = 32 * kSumBlock;
constexpr float kLowest = std::numeric_limits<float>::lowest();

// The queries of some tokens of one row and one key head, with the state of their running softmax.
class QueryGroup {
 public:
  QueryGroup(int64_t capacity, int64_t width)
      : width_(width), capacity_((capacity + kLanes - 1) / kLanes * kLanes), visible_(capacity) {
    buffer_.resize(capacity_ * (2 * width + kLanes + 2) / kLanes);
    queries_ = reinterpret_cast<float*>(buffer_.data());
    weighted_ = queries_ + capacity_ * width;
    total_ = weighted_ + capacity_ * width;
    peak_ = total_ + capacity_ * kLanes;
    rescale_ = peak_ + capacity_;
    std::fill_n(peak_, capacity_, kLowest);
  }

  QueryGroup(QueryGroup&&) = default;  // a copy would write to the same memory

  // Adds a query that sees the first `slots` slots of its row; `out` is for its result.
  void add(const float* query, int64_t slots, float* out) {
    const int64_t m = outputs_.size();
    for (int64_t c = 0; c < width_; ++c) queries_[m * width_ + c] = query[c] * kLog2e;
    visible_[m] = slots;
    outputs_.push_back(out);
    longest_ = std::max(longest_, slots);
  }

  int64_t longest() const { return longest_; }

  // Reads the block whose first slot is `first`, for a few queries at a time, so that their scores stay in the CPU's cache.
  // `scores` is a buffer for them.
  void read(const float* keys, const float* values, int64_t first, int64_t block, float* scores) {
    const int64_t count = outputs_.size();
    const int64_t length = std::min(block, (longest_ - first + kExpScores - 1) / kExpScores * kExpScores);
    for (int64_t begin = 0; begin < count; begin += kQueryTile)
      read_tile(begin, std::min(begin + kQueryTile, count), keys, values, first, length, block, scores);
  }

  // Divides the sums and writes the results.
  void finish() const {
    for (size_t m = 0; m < outputs_.size(); ++m) {
      float sum = 0;
      for (int i = 0; i < kLanes; ++i) sum += total_[m * kLanes + i];
      for (int64_t c = 0; c < width_; ++c) outputs_[m][c] = weighted_[m * width_ + c] / sum;
    }
  }

 private:
  // Running softmax (Milakov & Gimelshein 2018) of queries begin..end-1 over the first `length` slots of a block.
  void read_tile(int64_t begin, int64_t end, const float* keys, const float* values, int64_t first, int64_t length,
                 int64_t block, float* scores) {
    const int64_t count = end - begin;
    multiply<kRows>({queries_ + begin * width_, width_}, {keys, block}, count, width_, length, nullptr, scores, block);
    float *peak = peak_ + begin, *rescale = rescale_ + begin, *total = total_ + begin * kLanes;
    for (int64_t m = 0; m < count; ++m) {
      float* score = scores + m * block;
      const int64_t visible = std::max<int64_t>(visible_[begin + m] - first, 0);
      if (visible < length) std::fill(score + visible, score + length, kLowest);
      Lanes high = load(score);
      for (int64_t s = kLanes; s < length; s += kLanes) high = larger(high, load(score + s));
      const float before = peak[m];
      peak[m] = largest_of<kLanes>(larger(high, broadcast(before)));
      rescale[m] = before - peak[m];
    }
    for (int64_t m = 0; m < count; m += kLanes) {
      Lanes x[] = {load(rescale + m)};
      power_of_two(x);
      store(rescale + m, x[0]);
    }
    for (int64_t m = 0; m < count; ++m) {
      float* score = scores + m * block;
      const int64_t visible = std::max<int64_t>(visible_[begin + m] - first, 0);
      const Lanes highest = broadcast(peak[m]);
      Lanes sum = load(total + m * kLanes) * rescale[m];
      for (int64_t s = 0; s < length; s += kExpScores) {
        Lanes x[kExpRegisters];
        for (int i = 0; i < kExpRegisters; ++i) x[i] = load(score + s + i * kLanes) - highest;
        power_of_two(x);
        for (int i = 0; i < kExpRegisters; ++i) store(score + s + i * kLanes, x[i]);
        if (visible < s + kExpScores) {  // masked slots have weight 0
          std::fill(score + std::max(visible, s), score + s + kExpScores, 0.0f);
          for (int i = 0; i < kExpRegisters; ++i) x[i] = load(score + s + i * kLanes);
        }
        sum += (x[0] + x[1]) + (x[2] + x[3]);
      }
      store(total + m * kLanes, sum);
    }
    multiply<kRows>({scores, block}, {values, width_}, count, length, width_, rescale, weighted_ + begin * width_, width_);
  }

  int64_t width_, capacity_;
  int64_t longest_ = 0;  // the largest number in visible_
  std::vector<Lanes> buffer_;  // aligned to a register
  float* queries_;   // queries times log2(e)
  float* weighted_;  // sum of the values times their softmax weights, for each query
  float* total_;     // sum of the weights, kLanes partial sums for each query
  float* peak_;      // largest score so far
  float* rescale_;   // 2^(previous peak - new peak)
  std::vector<int64_t> visible_;  // number of slots that each query sees
  std::vector<float*> outputs_;   // where each query's result is written
};

// A token: its row, the number of slots that it sees, its queries [N, H], and the place for the attention's output.
struct Token {
  int64_t row, slots;
  const float* queries;
  float* out;
};

// One layer's cache: keys [blocks, R, K, H, slot] and values [blocks, R, K, slot, H].
template <typename Number>
struct Cache {
  Number *keys, *values;
  int64_t rows, heads, width, block;

  int64_t at(int64_t slot, int64_t row, int64_t head) const {
    return ((slot / block * rows + row) * heads + head) * block * width;
  }
};

// Attention of tokens that are sorted by row. All QueryGroups of a row read a block before the next block is read, so that the
// block is still in the CPU's cache.
void attend(const std::vector<Token>& tokens, const Cache<const float>& cache, int64_t group, ThreadTeam& team) {
  const int64_t count = tokens.size(), block = cache.block;
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin; end < count && tokens[end].row == tokens[begin].row;) ++end;
    rows.emplace_back(begin, end);
  }
  team.each(rows.size() * cache.heads, [&](int64_t number) {
    const auto [begin, end] = rows[number / cache.heads];
    const int64_t head = number % cache.heads;
    thread_local std::vector<Lanes> scores;
    scores.resize(kQueryTile * block / kLanes);
    std::vector<QueryGroup> groups;
    groups.reserve((end - begin + kGroupTokens - 1) / kGroupTokens);
    int64_t longest = 0;
    for (int64_t first = begin; first < end; first += kGroupTokens) {
      const int64_t last = std::min(first + kGroupTokens, end);
      groups.emplace_back((last - first) * group, cache.width);
      for (int64_t t = first; t < last; ++t)
        for (int64_t g = head * group; g < (head + 1) * group; ++g)
          groups.back().add(tokens[t].queries + g * cache.width, tokens[t].slots, tokens[t].out + g * cache.width);
      longest = std::max(longest, groups.back().longest());
    }
    for (int64_t first = 0; first < longest; first += block) {
      const int64_t at = cache.at(first, tokens[begin].row, head);
      for (QueryGroup& queries : groups)
        if (first < queries.longest())
          queries.read(cache.keys + at, cache.values + at, first, block, reinterpret_cast<float*>(scores.data()));
    }
    for (const QueryGroup& queries : groups) queries.finish();
  });
}

// Indices of the tokens [P, T] with a valid slot and row, sorted by row.
std::vector<int64_t> valid_tokens(const int32_t* positions, const int32_t* rows, int64_t entries, int64_t time, int64_t slots,
                            int64_t all_rows) {
  std::vector<int64_t> indices;
  for (int64_t n = 0; n < entries * time; ++n)
    if (0 <= positions[n] && positions[n] < slots && 0 <= rows[n / time] && rows[n / time] < all_rows) indices.push_back(n);
  std::stable_sort(indices.begin(), indices.end(), [&](int64_t x, int64_t y) { return rows[x / time] < rows[y / time]; });
  return indices;
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                  ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> rows, int32_t slots,
                  ffi::ResultBuffer<ffi::F32> out) {
  const auto shape = q.dimensions(), cache_shape = v.dimensions();
  const int64_t time = shape[1], heads = shape[2], width = shape[3], kv_heads = cache_shape[3];
  const int64_t first = layer.typed_data()[0] * cache_shape[1] * cache_shape[2] * kv_heads * cache_shape[4] * width;
  const Cache<const float> cache = {
      k.typed_data() + first, v.typed_data() + first, cache_shape[2], kv_heads, width, cache_shape[4]};
  std::fill_n(out->typed_data(), out->element_count(), 0.0f);
  std::vector<Token> tokens;
  for (int64_t n : valid_tokens(positions.typed_data(), rows.typed_data(), shape[0], time, slots, cache_shape[2])) {
    const int64_t offset = n * heads * width;
    tokens.push_back(
        {rows.typed_data()[n / time], positions.typed_data()[n] + 1, q.typed_data() + offset, out->typed_data() + offset});
  }
  ThreadTeam single(pool, 1);
  attend(tokens, cache, heads / kv_heads, single);
  return ffi::Error::Success();
}

// x / rms(x) * scale.
void normalise(const float* x, const float* scale, int64_t width, float eps, float* out) {
  Lanes squares{};
  for (int64_t c = 0; c < width; c += kLanes) squares += load(x + c) * load(x + c);
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += squares[i];
  const float inverse = 1 / std::sqrt(sum / width + eps);
  for (int64_t c = 0; c < width; c += kLanes) store(out + c, load(x + c) * inverse * load(scale + c));
}

// x = silu(x) y. The exponential's argument is never above 0, and the result is 0 where the exponential would underflow.
void gated(float* x, const float* y, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes) {
    const Lanes given = load(x + c);
    Lanes small[] = {(given < 0 ? given : -given) * kLog2e};
    power_of_two(small);
    const Lanes silu = given * (given < 0 ? small[0] : broadcast(1)) / (small[0] + 1);
    store(x + c, (given < -87 ? Lanes{} : silu) * load(y + c));
  }
}

bool finite(const float* x, int64_t count) {
  Lanes zeros{};
  for (int64_t c = 0; c < count; c += kLanes) zeros += load(x + c) * 0;
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += zeros[i];
  return sum == 0;
}

struct Sizes {
  int64_t hidden, heads, kv_heads, width, mlp;
  float eps;
};

// Projects tokens to heads, with bias, norm and rotary angle.
void project_heads(const float* x, const float* weight, const float* bias, const float* norm, const float* const* cosines,
                   const float* const* sines, int64_t count, int64_t heads, float scale, const Sizes& s, ThreadTeam& team,
                   float* out) {
  const int64_t half = s.width / 2, all_heads = heads * s.width;
  product(x, weight, count, s.hidden, all_heads, out, team);
  for (int64_t m = 0; m < count; ++m) {
    float* projected = out + m * all_heads;
    if (bias)
      for (int64_t c = 0; c < all_heads; ++c) projected[c] += bias[c];
    for (float* head = projected; head < projected + all_heads; head += s.width) {
      if (norm) normalise(head, norm, s.width, s.eps, head);
      if (cosines)
        for (int64_t c = 0; c < half; ++c) {
          const float first = head[c], second = head[c + half], cosine = cosines[m][c], sine = sines[m][c];
          head[c] = (first * cosine - second * sine) * scale;
          head[c + half] = (second * cosine + first * sine) * scale;
        }
    }
  }
}

// Order of the arguments; the last five may be empty.
enum {
  kX,
  kCosines,
  kSines,
  kKeys,
  kValues,
  kAttentionNorm,
  kQ,
  kK,
  kV,
  kO,
  kMlpNorm,
  kGate,
  kUp,
  kDown,
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm
};

ffi::Error Layers(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> rows, ffi::RemainingArgs given,
                  int32_t slots, float eps, bool last_layer_attends, int32_t threads, ffi::ResultBuffer<ffi::F32> out,
                  ffi::ResultBuffer<ffi::F32> keys, ffi::ResultBuffer<ffi::F32> values) {
  std::vector<ffi::Buffer<ffi::F32>> args;
  for (size_t i = 0; i < given.size(); ++i) {
    auto arg = given.get<ffi::Buffer<ffi::F32>>(i);
    if (!arg) return arg.error();
    args.push_back(*arg);
  }
  const auto cache_shape = values->dimensions(), shape = args[kQ].dimensions();
  const int64_t layers = shape[0], time = positions.dimensions()[1], block = cache_shape[4], half = shape[3] / 2;
  const Sizes s = {shape[1], shape[2], cache_shape[3], shape[3], args[kGate].dimensions()[2], eps};
  const int64_t q_width = s.heads * s.width, kv_width = s.kv_heads * s.width;
  const int64_t layer_size = cache_shape[1] * cache_shape[2] * cache_shape[3] * block * s.width;
  const int64_t entries = positions.dimensions()[0];
  const auto indices = valid_tokens(positions.typed_data(), rows.typed_data(), entries, time, slots, cache_shape[2]);
  const int64_t count = indices.size(), chunk = s.hidden * s.mlp < kLargeMatrix ? kChunkTokens : 4 * kChunkTokens;
  const int64_t max_chunk = std::min(count, chunk);
  std::vector<Lanes> buffer((count * (s.hidden + 2 * q_width) + max_chunk * (s.hidden + kv_width + 2 * s.mlp)) / kLanes);
  float* x = reinterpret_cast<float*>(buffer.data());
  float *queries = x + count * s.hidden, *attended = queries + count * q_width, *y = attended + count * q_width;
  float *heads = y + max_chunk * s.hidden, *gate = heads + max_chunk * kv_width, *up = gate + max_chunk * s.mlp;

  ThreadTeam team(pool, threads);
  std::vector<Token> tokens;
  std::vector<const float*> cosines, sines;
  for (int64_t m = 0; m < count; ++m) {
    const int64_t n = indices[m];
    std::copy_n(args[kX].typed_data() + n * s.hidden, s.hidden, x + m * s.hidden);
    tokens.push_back(
        {rows.typed_data()[n / time], positions.typed_data()[n] + 1, queries + m * q_width, attended + m * q_width});
    cosines.push_back(args[kCosines].typed_data() + n * half);
    sines.push_back(args[kSines].typed_data() + n * half);
  }

  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto weight = [&](int which) -> const float* {
      const int64_t size = args[which].element_count() / layers;
      return size ? args[which].typed_data() + layer * size : nullptr;
    };
    const Cache<float> cache = {
        keys->typed_data() + layer * layer_size, values->typed_data() + layer * layer_size, cache_shape[2], s.kv_heads, s.width,
        block};
    const bool reads = last_layer_attends || layer + 1 < layers;
    for (int64_t begin = 0; begin < count; begin += chunk) {
      const int64_t chunk_size = std::min(count - begin, chunk);
      const auto project = [&](int kernel, int bias, const float* norm, bool rotary, int64_t head_count, float scale,
                               float* to) {
        project_heads(y, weight(kernel), weight(bias), norm, rotary ? cosines.data() + begin : nullptr, sines.data() + begin,
                      chunk_size, head_count, scale, s, team, to);
      };
      for (int64_t m = 0; m < chunk_size; ++m)
        normalise(x + (begin + m) * s.hidden, weight(kAttentionNorm), s.hidden, eps, y + m * s.hidden);
      if (reads)
        project(kQ, kQBias, weight(kQNorm), true, s.heads, 1 / std::sqrt(static_cast<float>(s.width)),
                queries + begin * q_width);
      for (const bool of_keys : {true, false}) {
        if (of_keys)
          project(kK, kKBias, weight(kKNorm), true, s.kv_heads, 1, heads);
        else
          project(kV, kVBias, nullptr, false, s.kv_heads, 1, heads);
        for (int64_t m = 0; m < chunk_size; ++m) {
          const int64_t slot = tokens[begin + m].slots - 1, place = slot % block;
          for (int64_t head = 0; head < s.kv_heads; ++head) {
            const float* from = heads + m * kv_width + head * s.width;
            const int64_t at = cache.at(slot, tokens[begin + m].row, head);
            if (of_keys)
              for (int64_t c = 0; c < s.width; ++c) cache.keys[at + c * block + place] = from[c];
            else if (finite(from, s.width))
              std::copy_n(from, s.width, cache.values + at + place * s.width);
            else {  // as in cache.py: the key becomes NaN and the value 0, since 0 * NaN would reach masked queries
              std::fill_n(cache.values + at + place * s.width, s.width, 0.0f);
              cache.keys[at + place] = std::numeric_limits<float>::quiet_NaN();
            }
          }
        }
      }
    }
    if (!reads) break;
    attend(tokens, {cache.keys, cache.values, cache.rows, cache.heads, cache.width, cache.block}, s.heads / s.kv_heads, team);
    for (int64_t begin = 0; begin < count; begin += chunk) {
      const int64_t chunk_size = std::min(count - begin, chunk);
      float* here = x + begin * s.hidden;
      product(attended + begin * q_width, weight(kO), chunk_size, q_width, s.hidden, here, team, true);
      for (int64_t m = 0; m < chunk_size; ++m)
        normalise(here + m * s.hidden, weight(kMlpNorm), s.hidden, eps, y + m * s.hidden);
      product(y, weight(kGate), chunk_size, s.hidden, s.mlp, gate, team);
      product(y, weight(kUp), chunk_size, s.hidden, s.mlp, up, team);
      gated(gate, up, chunk_size * s.mlp);
      product(gate, weight(kDown), chunk_size, s.mlp, s.hidden, here, team, true);
    }
  }

  std::fill_n(out->typed_data(), out->element_count(), 0.0f);
  for (int64_t m = 0; m < count; ++m) std::copy_n(x + m * s.hidden, s.hidden, out->typed_data() + indices[m] * s.hidden);
  return ffi::Error::Success();
}

// weights = e^((x - highest) / temperature) of a row.
void softmax_weights(const float* x, int64_t count, float highest, float temperature, float* weights) {
  const float scale = kLog2e / temperature;
  for (int64_t c = 0; c < count; c += kLanes) {
    const Lanes given = (load(x + c) - highest) * scale;
    Lanes power[] = {given};
    power_of_two(power);
    store(weights + c, given < -126 ? Lanes{} : power[0]);
  }
}

// Sums the weights of each block, and returns the sum of all.
double sum_up(const float* weights, int64_t count, std::vector<float>& sums) {
  double total = 0;
  sums.clear();
  for (int64_t first = 0; first < count; first += kSumBlock) {
    Lanes sum{};
    for (int64_t c = first; c < std::min(first + kSumBlock, count); c += kLanes) sum += load(weights + c);
    sums.push_back(0);
    for (int i = 0; i < kLanes; ++i) sums.back() += sum[i];
    total += sums.back();
  }
  return total;
}

// Top-k: sets the weights to 0 where x is not among its `most` largest values; ties with the last of them are kept. x must not
// contain NaN.
void keep_top_k(const float* x, int64_t count, int64_t most, float* weights) {
  std::vector<float> sorted(x, x + count);
  std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(), std::greater<float>());
  for (int64_t c = 0; c < count; ++c)
    if (x[c] < sorted[most - 1]) weights[c] = 0;
}

// Top-p: keeps the fewest largest weights that sum to at least `least`, and ties with the last of them; sets all others to 0. A
// binary search finds the threshold bit by bit, since non-negative floats are ordered like their bits. It starts at bit 29, since
// no weight is above 1.
void keep_top_p(float* weights, int64_t count, double least) {
  int32_t threshold = 0;
  int64_t retained = count;  // number of weights at or above the threshold
  int64_t above = 0;         // number of weights at or above the lowest threshold known to be too high
  for (int bit = 29; bit >= 0 && retained - above > 1; --bit) {
    const int32_t higher = threshold | 1 << bit;
    float bound;
    std::memcpy(&bound, &higher, sizeof bound);
    double mass = 0;
    int64_t kept = 0;
    for (int64_t first = 0; first < count; first += kTopPBlock) {
      Lanes sum{};
      Ints more{};
      for (int64_t c = first; c < std::min(first + kTopPBlock, count); c += kLanes) {
        const Lanes x = load(weights + c);
        sum += x >= bound ? x : Lanes{};
        more += x >= bound;  // a true comparison is -1
      }
      for (int i = 0; i < kLanes; ++i) mass += sum[i], kept -= more[i];
    }
    (mass >= least ? retained : above) = kept;
    if (mass >= least) threshold = higher;
  }
  float bound;
  std::memcpy(&bound, &threshold, sizeof bound);
  for (int64_t c = 0; c < count; ++c)
    if (weights[c] < bound) weights[c] = 0;
}

// Inverts a cumulative sum that starts at `begin`: finds the positive weight whose interval [sum before it, sum including it)
// contains `target`, or the last positive one if rounding leaves `target` above all. Sets `begin` to the sum before it.
int64_t find_cumulative(const float* weights, int64_t count, double target, double& begin) {
  int64_t index = 0;
  double next = begin;
  for (int64_t i = 0; i < count && next <= target; next += weights[i++])
    if (weights[i] > 0) {
      index = i;
      begin = next;
    }
  return index;
}

// Samples a token for each hidden state x [B, D] with an unembedding table [D, V]: inverts the cumulative distribution at a
// number in [0, 1), with temperature, top-k (0: all) and top-p; at temperature 0 takes the first of the most likely tokens.
// Returns ids; `full_logprobs`, at temperature 1 among all tokens; and `sampled_logprobs`, with temperature, top-k and top-p (0 if
// greedy).
ffi::Error Draw(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> table, ffi::Buffer<ffi::F32> uniform,
                ffi::Buffer<ffi::F32> temperature, float top_p, int32_t top_k, int32_t threads, ffi::ResultBuffer<ffi::S32> ids,
                ffi::ResultBuffer<ffi::F32> full_logprobs, ffi::ResultBuffer<ffi::F32> sampled_logprobs) {
  const int64_t count = x.dimensions()[0], inner = x.dimensions()[1], width = table.dimensions()[1];
  std::vector<Lanes> room(count * width / kLanes);
  float* const logits = reinterpret_cast<float*>(room.data());
  ThreadTeam team(pool, threads);
  product(x.typed_data(), table.typed_data(), count, inner, width, logits, team);
  team.each(count, [&](int64_t row) {
    thread_local std::vector<Lanes> buffer;
    thread_local std::vector<float> sums;
    buffer.resize(width / kLanes);
    float* const weights = reinterpret_cast<float*>(buffer.data());
    const float *row_logits = logits + row * width, row_temperature = temperature.typed_data()[row];
    Lanes high = load(row_logits);
    for (int64_t c = kLanes; c < width; c += kLanes) high = larger(high, load(row_logits + c));
    const float highest = largest_of<kLanes>(high);
    const bool greedy = row_temperature == 0;
    softmax_weights(row_logits, width, highest, 1, weights);
    const double total_at_one = sum_up(weights, width, sums);
    double total = total_at_one;
    // If the logits contain NaN, `highest` may not be found; the id must still be valid.
    int64_t id = std::min<int64_t>(std::find(row_logits, row_logits + width, highest) - row_logits, width - 1);
    if (!greedy) {
      const bool has_nan = total_at_one != total_at_one;
      const bool top_k_applies = 0 < top_k && top_k < width && !has_nan;
      if (row_temperature != 1) softmax_weights(row_logits, width, highest, row_temperature, weights);
      if (top_k_applies) keep_top_k(row_logits, width, top_k, weights);
      if (row_temperature != 1 || top_k_applies) total = sum_up(weights, width, sums);
      if (top_p < 1) {
        keep_top_p(weights, width, top_p * total);
        total = sum_up(weights, width, sums);
      }
      const double target = uniform.typed_data()[row] * total;
      double begin = 0;
      id = find_cumulative(sums.data(), sums.size(), target, begin) * kSumBlock;
      id += find_cumulative(weights + id, std::min(kSumBlock, width - id), target, begin);
    }
    ids->typed_data()[row] = id;
    full_logprobs->typed_data()[row] = row_logits[id] - highest - std::log(total_at_one);
    sampled_logprobs->typed_data()[row] = greedy ? 0 : (row_logits[id] - highest) / row_temperature - std::log(total);
  });
  return ffi::Error::Success();
}

// Copies blocks begin..end-1 of rows source to rows target, in all layers; ignores entries without a valid row. All rows of a
// block are read before any is written.
ffi::Error Copy(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::S32> target, ffi::Buffer<ffi::S32> begin,
                ffi::Buffer<ffi::S32> end, ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::F32>, int32_t threads,
                ffi::ResultBuffer<ffi::F32> keys, ffi::ResultBuffer<ffi::F32> values) {
  struct Request {
    int64_t source, target, begin, end;
  };
  const auto cache_shape = values->dimensions();
  const int64_t layers = cache_shape[0], rows = cache_shape[2], size = cache_shape[3] * cache_shape[4] * cache_shape[5];
  int64_t first = cache_shape[1], last = 0;
  std::vector<Request> requests;
  for (size_t p = 0; p < source.element_count(); ++p) {
    const Request request = {source.typed_data()[p], target.typed_data()[p], std::max(begin.typed_data()[p], 0),
                             std::min<int64_t>(end.typed_data()[p], cache_shape[1])};
    const bool within = 0 <= request.source && request.source < rows && 0 <= request.target && request.target < rows;
    if (!within || request.source == request.target || request.begin >= request.end) continue;
    requests.push_back(request);
    first = std::min(first, request.begin);
    last = std::max(last, request.end);
  }
  ThreadTeam(pool, threads).each(requests.empty() ? 0 : 2 * layers * (last - first), [&](int64_t number) {
    const int64_t layer = number / 2 / (last - first), block = first + number / 2 % (last - first);
    float* const all = (number % 2 ? keys : values)->typed_data() + (layer * cache_shape[1] + block) * rows * size;
    const auto includes = [block](const Request& request) { return request.begin <= block && block < request.end; };
    std::vector<std::vector<float>> saved;  // copies of the sources that are also targets; empty for the others
    for (const Request& request : requests) {
      const bool written = includes(request) && std::any_of(requests.begin(), requests.end(), [&](const Request& other) {
                             return includes(other) && other.target == request.source;
                           });
      saved.emplace_back(all + request.source * size, all + (request.source + written) * size);
    }
    for (size_t p = 0; p < requests.size(); ++p)
      if (includes(requests[p]))
        std::copy_n(saved[p].empty() ? all + requests[p].source * size : saved[p].data(), size, all + requests[p].target * size);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_cache_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<int32_t>("slots")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_layers, Layers,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Attr<int32_t>("slots")
                                  .Attr<float>("eps")
                                  .Attr<bool>("last_layer_attends")
                                  .Attr<int32_t>("threads")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_draw, Draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("top_p")
                                  .Attr<int32_t>("top_k")
                                  .Attr<int32_t>("threads")
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_copy_rows, Copy,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("threads")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
