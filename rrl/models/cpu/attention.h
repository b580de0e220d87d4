// Attention over a key-value cache, with a running softmax.

#ifndef RRL_MODELS_CPU_ATTENTION_H_
#define RRL_MODELS_CPU_ATTENTION_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "products.h"

namespace {

// The softmax computes the exponentials of this many registers, and so of this many scores, at a time.
constexpr int64_t kExpRegisters = 4, kExpScores = kExpRegisters * kLanes;
// Number of queries whose scores with a block are in memory at a time.
constexpr int64_t kQueryTile = 16;
// Maximum number of tokens in a QueryGroup.
constexpr int64_t kGroupTokens = 32;
constexpr float kLowest = std::numeric_limits<float>::lowest();

// The queries of some tokens of one row and one key head, with the state of their running softmax. `capacity` is the maximum
// number of queries, `width` the head dimension.
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

// One layer's cache: keys [blocks, R, K, H, slot] and values [blocks, R, K, slot, H]. `rows` is R, `heads` K, `width` H, and
// `block` the number of slots of a block.
template <typename Number>
struct Cache {
  Number *keys, *values;
  int64_t rows, heads, width, block;

  int64_t at(int64_t slot, int64_t row, int64_t head) const {
    return ((slot / block * rows + row) * heads + head) * block * width;
  }
};

// Attention of tokens that are sorted by row. `group` is the number of query heads per key head. All QueryGroups of a row read a
// block before the next block is read, so that the block is still in the CPU's cache.
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

}  // namespace

#endif  // RRL_MODELS_CPU_ATTENTION_H_
