// Best fit with merging; segments grow with demand and live as long as their blocks.
#include "kernels/runtime/pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace deepep {
namespace {

constexpr size_t kAlignment = 256;             // bytes; also keeps neighbours off one cache line
constexpr size_t kFirstSegment = 16ull << 20;  // bytes; pages are only used once touched

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Pool::Piece Pool::allocate(size_t bytes) {
  bytes = round_up(std::max<size_t>(bytes, 1), kAlignment);
  std::lock_guard<std::mutex> lock(mutex_);
  if (post_ == nullptr) throw std::runtime_error("this Buffer has been destroyed");

  Segment* best = nullptr;
  std::pair<size_t, size_t> hole{0, SIZE_MAX};
  for (Segment& segment : segments_) {
    for (const auto& [offset, size] : segment.free) {
      if (size >= bytes && size < hole.second) best = &segment, hole = {offset, size};
    }
  }
  if (best == nullptr) {
    // As much again as there is, so that the number of segments stays small.
    size_t total = 0;
    for (const Segment& segment : segments_) total += segment.memory->bytes();
    const size_t size = std::max({round_up(bytes, 1 << 16), kFirstSegment, total});
    auto memory = Memory::create(space_, size);
    const int slot = post_(memory);
    segments_.push_back({std::move(memory), slot, {{0, size}}});
    best = &segments_.back();
    hole = {0, size};
  }
  best->free.erase(hole.first);
  if (hole.second > bytes) best->free[hole.first + bytes] = hole.second - bytes;
  used_ += bytes;
  return {best->memory->data() + hole.first, bytes, best->slot, hole.first};
}

void Pool::release(const Piece& piece) {
  std::lock_guard<std::mutex> lock(mutex_);
  used_ -= piece.bytes;
  for (Segment& segment : segments_) {
    if (segment.slot != piece.segment) continue;
    auto at = segment.free.emplace(piece.offset, piece.bytes).first;
    const auto next = std::next(at);
    if (next != segment.free.end() && at->first + at->second == next->first) {
      at->second += next->second;
      segment.free.erase(next);
    }
    if (at != segment.free.begin()) {
      const auto before = std::prev(at);
      if (before->first + before->second == at->first) {
        before->second += at->second;
        segment.free.erase(at);
      }
    }
  }
}

void Pool::retire() {
  std::lock_guard<std::mutex> lock(mutex_);
  post_ = nullptr;
}

DeepEpLocator Pool::locate(const void* data, size_t bytes) const {
  const char* at = static_cast<const char*>(data);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Segment& segment : segments_) {
    const char* base = segment.memory->data();
    if (at < base || at + bytes > base + segment.memory->bytes()) continue;
    return static_cast<uint64_t>(segment.slot) << 48 | static_cast<uint64_t>(at - base);
  }
  return DEEPEP_NO_LOCATOR;
}

size_t Pool::reserved_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t total = 0;
  for (const Segment& segment : segments_) total += segment.memory->bytes();
  return total;
}

size_t Pool::used_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

}  // namespace deepep
