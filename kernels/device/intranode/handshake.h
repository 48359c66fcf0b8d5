// The three handshakes of an operation inside one memory domain: say where my memory is, hear where
// the peers' is, close. Used by dispatch and combine.
#ifndef KERNELS_DEVICE_INTRANODE_HANDSHAKE_H_
#define KERNELS_DEVICE_INTRANODE_HANDSHAKE_H_

#include "kernels/device/operation.h"

namespace deepep {

constexpr int kMaxScales = (1 << 14) - 1;  // per row, as pack_signature counts them

// What must agree on all ranks, in one word: 24 bits row bytes, 14 scales, 6 top-k, 2 kind of ids
// (0 none, 1 int32, 2 int64), 18 experts.
DEEPEP_DEVICE uint64_t pack_signature(uint64_t row_bytes, int num_scales, int num_topk,
                                      int idx_bytes, int num_experts) {
  const uint64_t idx_kind = num_topk == 0 ? 0 : static_cast<uint64_t>(idx_bytes / 4);
  return row_bytes | static_cast<uint64_t>(num_scales) << 24 |
         static_cast<uint64_t>(num_topk) << 38 | idx_kind << 44 |
         static_cast<uint64_t>(num_experts) << 46;
}

// Tells every peer where this rank's tensors are, and that its stream has come this far: peers may
// write to them (dispatch) or read them (combine).
template <class Team>
DEEPEP_DEVICE void publish_entry(const Operation& op, Team block, int num_ranks,
                                 const DeepEpLocator (&at)[5], uint64_t capacity,
                                 uint64_t signature) {
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    Entry* entry = &op.control(peer)->entries[op.op()][op.rank()];
    entry->signature = signature;
    entry->capacity = capacity;
    for (int i = 0; i < 5; ++i) entry->at[i] = at[i];
    arch::store_release(&entry->epoch, op.epoch());  // acquired by wait_entries at the peer
  }
}

// Waits until every peer has published its entry, and compares the arguments that must agree.
template <class Team>
DEEPEP_DEVICE bool wait_entries(Operation& op, Team block, int num_ranks, uint64_t signature) {
  op.start_phase();
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const Entry* entry = &op.own()->entries[op.op()][peer];
    const uint64_t epoch = op.epoch();
    const uint64_t seen = op.wait(&entry->epoch, peer, DEEPEP_PHASE_ADDRESS, epoch,
                                  [=](uint64_t value) { return value >= epoch; });
    if (seen >= epoch && entry->signature != signature) {
      op.fail(DEEPEP_MISMATCH, DEEPEP_PHASE_ADDRESS, peer, signature, entry->signature);
    }
  }
  return op.ok(block);
}

// Tells every peer that this rank neither reads nor writes the peer's memory any more. Comes after
// the last block's arrival, so it speaks for the whole grid.
template <class Team>
DEEPEP_DEVICE void send_done(const Operation& op, Team block, int num_ranks) {
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    arch::store_release(&op.control(peer)->done[op.op()][op.rank()],
                        op.epoch());  // acquired by wait_done at the peer
  }
}

template <class Team>
DEEPEP_DEVICE bool wait_done(Operation& op, Team block, int num_ranks) {
  op.start_phase();
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const uint64_t epoch = op.epoch();
    op.wait(&op.own()->done[op.op()][peer], peer, DEEPEP_PHASE_DONE, epoch,
            [=](uint64_t value) { return value >= epoch; });
  }
  return op.ok(block);
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_HANDSHAKE_H_
