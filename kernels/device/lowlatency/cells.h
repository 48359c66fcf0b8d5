// Cells: words that say to which operation they belong, so that data is its own flag and nothing is
// ever reset. One operation's number and 24 bits of value.
#ifndef KERNELS_DEVICE_LOWLATENCY_CELLS_H_
#define KERNELS_DEVICE_LOWLATENCY_CELLS_H_

#include "kernels/device/lowlatency/sequence.h"

namespace deepep {

constexpr int kCellValueBits = 24;
constexpr uint32_t kCellValueMask = (1u << kCellValueBits) - 1;

DEEPEP_DEVICE uint64_t make_cell(uint64_t epoch, uint32_t value) {
  return epoch << kCellValueBits | (value & kCellValueMask);
}
DEEPEP_DEVICE bool cell_is_of(uint64_t cell, uint64_t epoch) {
  return (cell ^ make_cell(epoch, 0)) <= kCellValueMask;
}
DEEPEP_DEVICE uint32_t cell_value(uint64_t cell) {
  return static_cast<uint32_t>(cell) & kCellValueMask;
}

// Waits until `source` has written this cell of the running operation, and acquires what it
// announces: pairs with fence_cells() and store_cell(). False: it has not, and is masked, or a
// fault was recorded.
DEEPEP_DEVICE bool await_cell(Sequence& op, const uint64_t* cell, int source, DeepEpPhase phase,
                              uint32_t* value) {
  const uint64_t epoch = op.epoch();
  uint64_t seen;
  if (!op.await(
          cell, source, phase, epoch, [=](uint64_t v) { return cell_is_of(v, epoch); }, &seen)) {
    return false;
  }
  *value = cell_value(seen);
  return true;
}

// ---- Heads: what each rank tells every other about its part in the operation.

// A locator in two values: memory is exported in pieces of whole kPartAlignment bytes.
DEEPEP_DEVICE uint64_t pack_locator(DeepEpLocator at) {
  const uint64_t offset = at & ((uint64_t{1} << 48) - 1);
  return (at >> 48) << 38 | offset / kPartAlignment;
}
DEEPEP_DEVICE DeepEpLocator unpack_locator(uint64_t packed) {
  return (packed >> 38) << 48 | (packed & ((uint64_t{1} << 38) - 1)) * kPartAlignment;
}
constexpr uint32_t kNoValue = ~0u;  // no cell has it
constexpr uint64_t kNoPlace = (uint64_t{1} << 48) - 1;

constexpr int kPlaceCells = 2;  // what may differ among ranks

struct Head {
  DeepEpLocator at;  // or DEEPEP_NO_LOCATOR
  uint64_t signature;  // pack_signature
  uint32_t max_tokens;

  // Value of cell i: kPlaceCells of the place, three of the signature, one of the tokens.
  DEEPEP_DEVICE uint32_t value(int i) const {
    const uint64_t place = at == DEEPEP_NO_LOCATOR ? kNoPlace : pack_locator(at);
    const uint64_t word = i < 2 ? place : i < 5 ? signature : max_tokens;
    const int part = i < 2 ? i : i < 5 ? i - 2 : 0;
    return static_cast<uint32_t>(word >> (part * kCellValueBits)) & kCellValueMask;
  }
};

// By the lanes that store `count` cells next, in steps of the team's size: these release what the
// team has done before its last sync.
template <class Team>
DEEPEP_DEVICE void fence_for(Team team, int count) {
  if (team.lane() < count) arch::fence_cells();
}

// Tells every peer. Comes after fence_for(), since the peers then read what is at the place, or
// write to it.
DEEPEP_DEVICE int num_head_cells(int num_ranks) { return num_ranks * kHeadCells; }
template <class Team>
DEEPEP_DEVICE void send_heads(const Sequence& op, Team block, int num_ranks, const Head& head) {
  for (int i = block.lane(); i < num_head_cells(num_ranks); i += block.size()) {
    const int peer = i / kHeadCells, cell = i % kHeadCells;
    if (op.is_masked(peer)) continue;
    arch::store_cell(op.heads(peer, op.rank()) + cell, make_cell(op.epoch(), head.value(cell)));
  }
}

// The same after what this rank has done in earlier kernels, and no other cells with it.
template <class Team>
DEEPEP_DEVICE void publish_head(const Sequence& op, Team block, int num_ranks, const Head& head) {
  fence_for(block, num_head_cells(num_ranks));
  send_heads(op, block, num_ranks, head);
}

// Waits for the heads of all peers, and meanwhile for what every lane awaits in also(); compares
// what must agree. Afterwards places[peer] is what the peer has told, as mapped here; NULL:
// nothing, or it is masked. The time that each peer took is added to `wait_stats` unless that is
// NULL.
template <class Team, class Also>
DEEPEP_DEVICE bool await_heads(Sequence& op, Team block, int num_ranks, const Head& mine,
                               char** places, int64_t* wait_stats, Also also) {
  op.start_phase();
  // All cells at once, since each look takes as long as all of them.
  DEEPEP_SHARED uint32_t values[DEEPEP_MAX_RANKS * kHeadCells];
  for (int i = block.lane(); i < num_head_cells(num_ranks); i += block.size()) {
    const int peer = i / kHeadCells, cell = i % kHeadCells;
    values[i] = kNoValue;
    if (op.is_masked(peer)) continue;
    const uint64_t start = wait_stats != nullptr ? arch::now_ns() : 0;
    const bool came =
        await_cell(op, op.heads(op.rank(), peer) + cell, peer, DEEPEP_PHASE_ADDRESS, values + i);
    if (came && cell >= kPlaceCells && values[i] != mine.value(cell)) op.disagree();
    if (wait_stats == nullptr || cell > 0) continue;
    arch::fetch_add(wait_stats + peer, static_cast<int64_t>(arch::now_ns() - start));
  }
  also();
  block.sync();
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const uint32_t* value = values + peer * kHeadCells;
    places[peer] = nullptr;
    bool came = true;
    for (int i = 0; i < kHeadCells; ++i) came = came && value[i] != kNoValue;
    if (!came) continue;
    const auto join = [&](int first, int count) {
      uint64_t word = 0;
      for (int i = 0; i < count; ++i) word |= uint64_t{value[first + i]} << (i * kCellValueBits);
      return word;
    };
    const uint64_t signature = join(2, 3);
    if (signature != mine.signature) {
      op.fail(DEEPEP_MISMATCH, DEEPEP_PHASE_ADDRESS, peer, mine.signature, signature);
    } else if (value[5] != mine.max_tokens) {
      op.fail(DEEPEP_MISMATCH, DEEPEP_PHASE_COUNTS, peer, mine.max_tokens, value[5]);
    } else if (join(0, 2) != kNoPlace) {
      places[peer] = op.locate(peer, unpack_locator(join(0, 2)));
    }
  }
  return op.ok(block);
}
template <class Team>
DEEPEP_DEVICE bool await_heads(Sequence& op, Team block, int num_ranks, const Head& mine,
                               char** places, int64_t* wait_stats) {
  return await_heads(op, block, num_ranks, mine, places, wait_stats, [] {});
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_LOWLATENCY_CELLS_H_
