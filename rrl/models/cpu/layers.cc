// CPU kernels for generation (see layers.py): decoder layers over a key-value cache, cache attention, token sampling, and
// copies of cache rows.
//
// Weights and cache are read in place. All queries of a key head read a block's keys and values together, and their scores stay
// in the CPU's L1 and L2 caches. The order of each sum depends only on the token's own position.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "packed.h"
#include "products.h"
#include "sampling.h"

namespace {

// Number of tokens per pass through a layer; four times as many if its weights are large.
constexpr int64_t kChunkTokens = 64;

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

// x = silu(x) y. The exponential's argument is -|x|, so it cannot overflow. The result is 0 for x < -87, where e^x would
// underflow.
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

// `width` is the head dimension.
struct Sizes {
  int64_t hidden, heads, kv_heads, width, mlp;
  float eps;
};

// Calls body(0), ..., body(count - 1) for `count` tokens of `width` numbers each, on several threads if there are many numbers.
template <typename Body>
void each_token(int64_t count, int64_t width, ThreadTeam& team, const Body& body) {
  team.each(count, body, count * width >= kLargeMatrix);
}

// Projects tokens to heads. Then adds the bias, normalises each head, rotates it (RoPE) and multiplies it by `scale`. Without
// `cosines` it is neither rotated nor scaled.
void project_heads(const float* x, Weight weight, const float* bias, const float* norm, const float* const* cosines,
                   const float* const* sines, int64_t count, int64_t heads, float scale, const Sizes& s, ThreadTeam& team,
                   float* out) {
  const int64_t half = s.width / 2, all_heads = heads * s.width;
  product(x, weight, count, s.hidden, all_heads, out, team);
  each_token(count, all_heads, team, [&](int64_t m) {
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
  });
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

// Runs all layers on the tokens with a valid slot and row (`cpu_layers` in layers.py). The buffers hold only these tokens, sorted
// by row. In each layer, the keys and values of all tokens are written before any of them attends.
ffi::Error Layers(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> rows, ffi::RemainingArgs given,
                  int32_t slots, int32_t query_heads, int32_t mlp, float eps, bool last_layer_attends, int32_t format,
                  int32_t threads, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> keys,
                  ffi::ResultBuffer<ffi::F32> values) {
  std::vector<ffi::AnyBuffer> args;
  for (size_t i = 0; i < given.size(); ++i) args.push_back(*given.get<ffi::AnyBuffer>(i));
  const auto floats = [&](int which) { return args[which].reinterpret_data<float>(); };
  const auto cache_shape = values->dimensions();
  const int64_t layers = cache_shape[0], time = positions.dimensions()[1], block = cache_shape[4], half = cache_shape[5] / 2;
  const Sizes s = {out->dimensions()[2], query_heads, cache_shape[3], cache_shape[5], mlp, eps};
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
    std::copy_n(floats(kX) + n * s.hidden, s.hidden, x + m * s.hidden);
    tokens.push_back(
        {rows.typed_data()[n / time], positions.typed_data()[n] + 1, queries + m * q_width, attended + m * q_width});
    cosines.push_back(floats(kCosines) + n * half);
    sines.push_back(floats(kSines) + n * half);
  }

  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto vector = [&](int which) -> const float* {
      const int64_t size = args[which].element_count() / layers;
      return size ? floats(which) + layer * size : nullptr;
    };
    const auto matrix = [&](int which) -> Weight {
      const char* data = static_cast<const char*>(args[which].untyped_data());
      return {static_cast<Format>(format), data + layer * (args[which].size_bytes() / layers)};
    };
    const Cache<float> cache = {
        keys->typed_data() + layer * layer_size, values->typed_data() + layer * layer_size, cache_shape[2], s.kv_heads, s.width,
        block};
    const bool reads = last_layer_attends || layer + 1 < layers;
    for (int64_t begin = 0; begin < count; begin += chunk) {
      const int64_t chunk_size = std::min(count - begin, chunk);
      const auto project = [&](int kernel, int bias, const float* norm, bool rotary, int64_t head_count, float scale,
                               float* to) {
        project_heads(y, matrix(kernel), vector(bias), norm, rotary ? cosines.data() + begin : nullptr, sines.data() + begin,
                      chunk_size, head_count, scale, s, team, to);
      };
      each_token(chunk_size, s.hidden, team, [&](int64_t m) {
        normalise(x + (begin + m) * s.hidden, vector(kAttentionNorm), s.hidden, eps, y + m * s.hidden);
      });
      if (reads)
        project(kQ, kQBias, vector(kQNorm), true, s.heads, 1 / std::sqrt(static_cast<float>(s.width)),
                queries + begin * q_width);
      for (const bool of_keys : {true, false}) {
        if (of_keys)
          project(kK, kKBias, vector(kKNorm), true, s.kv_heads, 1, heads);
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
            else {  // as in cache.py: the key gets a NaN and the value is 0, since 0 * NaN would reach masked queries
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
      product(attended + begin * q_width, matrix(kO), chunk_size, q_width, s.hidden, here, team, true);
      each_token(chunk_size, s.hidden, team,
                 [&](int64_t m) { normalise(here + m * s.hidden, vector(kMlpNorm), s.hidden, eps, y + m * s.hidden); });
      product(y, matrix(kGate), chunk_size, s.hidden, s.mlp, gate, team);
      product(y, matrix(kUp), chunk_size, s.hidden, s.mlp, up, team);
      each_token(chunk_size, s.mlp, team, [&](int64_t m) { gated(gate + m * s.mlp, up + m * s.mlp, s.mlp); });
      product(gate, matrix(kDown), chunk_size, s.mlp, s.hidden, here, team, true);
    }
  }

  std::fill_n(out->typed_data(), out->element_count(), 0.0f);
  for (int64_t m = 0; m < count; ++m) std::copy_n(x + m * s.hidden, s.hidden, out->typed_data() + indices[m] * s.hidden);
  return ffi::Error::Success();
}

// Samples a token for each hidden state x [B, D] with an unembedding table [D, V]: inverts the cumulative distribution at a
// number in [0, 1), with temperature, top-k (0: all) and top-p; at temperature 0 takes the first of the most likely tokens.
// Returns ids; `full_logprobs`, at temperature 1 among all tokens; and `sampled_logprobs`, with temperature, top-k and top-p (0 if
// greedy).
ffi::Error Draw(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer table, ffi::Buffer<ffi::F32> uniform,
                ffi::Buffer<ffi::F32> temperature, float top_p, int32_t top_k, int32_t vocabulary, int32_t format,
                int32_t threads, ffi::ResultBuffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> full_logprobs,
                ffi::ResultBuffer<ffi::F32> sampled_logprobs) {
  const int64_t count = x.dimensions()[0], inner = x.dimensions()[1], width = vocabulary;
  std::vector<Lanes> room(count * width / kLanes);
  float* const logits = reinterpret_cast<float*>(room.data());
  ThreadTeam team(pool, threads);
  product(x.typed_data(), {static_cast<Format>(format), table.untyped_data()}, count, inner, width, logits, team);
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

// Packs matrices [L, inner, width], or [L, width, inner] if `transposed`, into `out` [L, bytes].
ffi::Error Pack(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> matrices, bool transposed, int32_t format, int32_t threads,
                ffi::ResultBuffer<ffi::U8> out) {
  const auto shape = matrices.dimensions();
  const int64_t inner = shape[transposed ? 2 : 1], width = shape[transposed ? 1 : 2], bytes = out->dimensions()[1];
  ThreadTeam team(pool, threads);
  bool fits = true;
  const bool supported = with_format(static_cast<Format>(format), [&](auto number) {
    typedef decltype(number) Number;
    fits = bytes == packed_bytes<Number>(inner, width);
    for (int64_t layer = 0; fits && layer < shape[0]; ++layer)
      pack<Number>(matrices.typed_data() + layer * inner * width, inner, width, transposed ? 1 : width, transposed ? inner : 1,
                   out->typed_data() + layer * bytes, team);
  });
  if (!supported) return ffi::Error::InvalidArgument("this CPU does not support the packed format");
  if (!fits) return ffi::Error::InvalidArgument("the packed matrix has another size");
  return ffi::Error::Success();
}

}  // namespace

// Whether this CPU supports a packed format.
extern "C" bool rrl_supports_format(int32_t format) { return with_format(static_cast<Format>(format), [](auto) {}); }

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
                                  .Attr<int32_t>("heads")
                                  .Attr<int32_t>("mlp")
                                  .Attr<float>("eps")
                                  .Attr<bool>("last_layer_attends")
                                  .Attr<int32_t>("format")
                                  .Attr<int32_t>("threads")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_draw, Draw,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("top_p")
                                  .Attr<int32_t>("top_k")
                                  .Attr<int32_t>("vocabulary")
                                  .Attr<int32_t>("format")
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(rrl_pack, Pack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed")
                                  .Attr<int32_t>("format")
                                  .Attr<int32_t>("threads")
                                  .Ret<ffi::Buffer<ffi::U8>>());
