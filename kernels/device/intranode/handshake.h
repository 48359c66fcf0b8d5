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

// In place of a signature: the rank that published the entry has given up, and its memory may be
// used for something else soon. No arguments have this signature: its kind of ids does not exist.
constexpr uint64_t kWithdrawn = UINT64_MAX;
constexpr uint64_t kLastRowsNs = 200000000;  // rows of a peer that began in time take less
constexpr uint64_t kGlanceNs = kLastRowsNs / 10;  // a look at an entry is good for so long

// Takes back what publish_entry said, for a peer that comes only after this rank gave up: it must
// neither write into memory that may have another owner by then, nor take what it reads there for
// rows. A peer that has looked already moves its rows within milliseconds; they are waited for.
template <class Team>
DEEPEP_DEVICE void withdraw_entry(const Operation& op, Team block, int num_ranks) {
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    Entry* entry = &op.control(peer)->entries[op.op()][op.rank()];
    arch::store_relaxed(&entry->signature, kWithdrawn);
  }
  const uint64_t end = arch::now_ns() + kLastRowsNs;
  arch::Backoff backoff;
  while (arch::now_ns() < end) backoff.pause();
}

// Tells every peer where this rank's tensors are, and that its stream has come this far: peers may
// write to them (dispatch) or read them (combine).
template <class Team>
DEEPEP_DEVICE void publish_entry(const Operation& op, Team block, int num_ranks,
                                 const DeepEpLocator (&at)[5], uint64_t capacity,
                                 uint64_t signature) {
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    Entry* entry = &op.control(peer)->entries[op.op()][op.rank()];
    arch::store_relaxed(&entry->signature, signature);
    entry->capacity = capacity;
    for (int i = 0; i < 5; ++i) entry->at[i] = at[i];
    arch::store_release(&entry->epoch, op.epoch());  // acquired by wait_entries at the peer
  }
}

// Whether the peer has taken its entry back; then this rank gives up as well.
DEEPEP_DEVICE bool is_withdrawn(Operation& op, int peer) {
  const Entry* entry = &op.own()->entries[op.op()][peer];
  if (arch::load_relaxed(&entry->signature) != kWithdrawn) return false;
  op.fail(DEEPEP_TIMEOUT, DEEPEP_PHASE_ADDRESS, peer, op.epoch(), kWithdrawn);
  return true;
}

// Waits until every peer has published its entry, and compares the arguments that must agree.
template <class Team>
DEEPEP_DEVICE bool wait_entries(Operation& op, Team block, int num_ranks, uint64_t signature) {
  op.start_phase();
  const uint64_t start = arch::now_ns();
  bool late = false, withdrawn = false;  // some peer has not come; some has gone again
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const Entry* entry = &op.own()->entries[op.op()][peer];
    const uint64_t epoch = op.epoch();
    const uint64_t seen = op.wait(&entry->epoch, peer, DEEPEP_PHASE_ADDRESS, epoch,
                                  [=](uint64_t value) { return value >= epoch; });
    late |= seen < epoch;
    // Who misses the same peer as this rank may have gone a moment earlier; that says nothing more.
    if (late) continue;
    if (is_withdrawn(op, peer)) {
      withdrawn = true;
    } else if (const uint64_t theirs = arch::load_relaxed(&entry->signature); theirs != signature) {
      // Nobody goes on: in a group that disagrees every rank sees a signature that is not its own.
      op.fail(DEEPEP_MISMATCH, DEEPEP_PHASE_ADDRESS, peer, signature, theirs);
    }
  }
  bool ok = op.ok(block);
  // While this rank waited for one peer, another may have given up.
  if (ok && block.any(arch::now_ns() - start > kGlanceNs)) {
    for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
      withdrawn |= is_withdrawn(op, peer);
    }
    ok = op.ok(block);
  }
  if (!ok && block.any(late || withdrawn)) withdraw_entry(op, block, num_ranks);
  return ok;
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
  bool late = false;
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const uint64_t epoch = op.epoch();
    late |= op.wait(&op.own()->done[op.op()][peer], peer, DEEPEP_PHASE_DONE, epoch,
                    [=](uint64_t value) { return value >= epoch; }) < epoch;
  }
  const bool ok = op.ok(block);
  if (!ok && block.any(late)) withdraw_entry(op, block, num_ranks);
  return ok;
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_HANDSHAKE_H_
