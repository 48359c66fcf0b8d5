// What ranks across nodes hold, so that each can tell what the others sent: values, shapes, routing,
// and tensors with guard bytes. For internode_world.h.
#ifndef TESTS_KERNELS_INTERNODE_NUMBERS_H_
#define TESTS_KERNELS_INTERNODE_NUMBERS_H_

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/abi/deepep_internode.h"
#include "kernels/device/internode/memory.h"
#include "kernels/runtime/domain.h"

namespace world {

using deepep::Domain;
using deepep::Pool;

constexpr int kTopk = 3, kGuard = 64;

[[noreturn]] void give_up(const std::string& what);  // of the program
inline void expect(bool condition, const char* what) {
  if (!condition) give_up(std::string(what) + ": " + deepep_last_error());
}

// ---- Numbers: any rank can tell what the others hold

inline uint32_t mix(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t h = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u ^ d * 668265263u;
  h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
  return h;
}
inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
inline uint16_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// Values whose sum depends on the order, and on where it is rounded: large ones cancel.
inline uint16_t summand(uint32_t hash) {
  const float small = static_cast<float>(static_cast<int>(hash % 511) - 255) / 16.0f;
  const float large = hash & 1024 ? 16777216.0f : -16777216.0f;
  return round_to_bf16(hash >> 12 & 3 ? small : large);
}

// ---- Shapes

struct Shape {
  int nodes, per_node, channels, slots, rounds;
  int ranks() const { return nodes * per_node; }
  int experts() const { return 2 * ranks() + 1; }
  int hidden(int round) const { return round % 2 == 0 ? 16 : 40; }
  int64_t network_bytes() const {  // with `slots` messages of the longest kind in every ring
    const deepep::DispatchMessage message(per_node, 2 * hidden(1), 0, kTopk, 8);
    return deepep::network_bytes(nodes, per_node, channels, message.total, slots);
  }
  std::string text() const {
    return std::to_string(nodes) + "x" + std::to_string(per_node) + ", " +
           std::to_string(channels) + " channels of " + std::to_string(slots) + " slots";
  }
};

struct Routing {
  int num_tokens;
  std::vector<int64_t> ids;
  std::vector<float> weights;
};

inline Routing routing_of(const Shape& shape, int rank, int round, uint32_t seed) {
  std::mt19937 random(mix(seed, static_cast<uint32_t>(round), static_cast<uint32_t>(rank), 1));
  Routing routing;
  routing.num_tokens = random() % 4 == 0 ? 0 : static_cast<int>(random() % 9);
  const int style = static_cast<int>(random() % 4);  // anywhere, near the end, one expert, holes
  for (int i = 0; i < routing.num_tokens * kTopk; ++i) {
    const int experts = shape.experts();
    int64_t id = static_cast<int64_t>(random() % static_cast<unsigned>(experts));
    if (style == 1) id = experts - 1 - static_cast<int64_t>(random() % 3);
    if (style == 2) id = experts / 2;
    if (style == 3 && random() % 2 == 0) id = -1;
    routing.ids.push_back(id);
    routing.weights.push_back(static_cast<float>(random() % 64) / 7.0f);
  }
  return routing;
}

// A tensor in exported memory, with guard bytes behind it.
template <class T>
class Tensor {
 public:
  Tensor(Domain& domain, size_t count)
      : pool_(domain.pool()), bytes_(count * sizeof(T)), piece_(pool_->allocate(bytes_ + kGuard)) {
    std::memset(piece_.data, 0xa5, bytes_ + kGuard);
  }
  ~Tensor() {
    const auto* guard = reinterpret_cast<unsigned char*>(piece_.data + bytes_);
    for (int i = 0; i < kGuard; ++i) expect(guard[i] == 0xa5, "guard byte overwritten");
    pool_->release(piece_);
  }
  T* data() const { return reinterpret_cast<T*>(piece_.data); }
  DeepEpLocator at() const { return pool_->locate(data(), bytes_); }

 private:
  std::shared_ptr<Pool> pool_;
  size_t bytes_;
  Pool::Piece piece_;
};

}  // namespace world

#endif  // TESTS_KERNELS_INTERNODE_NUMBERS_H_
