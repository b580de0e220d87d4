// Weights, sums and truncation of a distribution over the vocabulary.

#ifndef RRL_MODELS_CPU_SAMPLING_H_
#define RRL_MODELS_CPU_SAMPLING_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "products.h"

namespace {

// To find the sampled token, the weights of this many vocabulary entries are summed at a time.
constexpr int64_t kSumBlock = 128;
// Top-p sums the weights of this many vocabulary entries in float32 before it adds them to a double.
constexpr int64_t kTopPBlock = 32 * kSumBlock;

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

}  // namespace

#endif  // RRL_MODELS_CPU_SAMPLING_H_
