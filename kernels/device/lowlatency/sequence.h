// The count that dispatches and combines of the low-latency mode share, and what it guards.
//
// Operation n uses half n & 1 of every workspace. A rank writes to a half only when all peers have
// finished with what it held before: they say so in `done`, and `outstanding` remembers that it was
// not seen yet. So two operations may be sent before the first is received, whatever the ranks do
// meanwhile, and a rank that is ahead of the others waits.
#ifndef KERNELS_DEVICE_LOWLATENCY_SEQUENCE_H_
#define KERNELS_DEVICE_LOWLATENCY_SEQUENCE_H_

#include "kernels/device/lowlatency/workspace.h"
#include "kernels/device/operation.h"

namespace deepep {

// Both kinds count, wait and close here.
constexpr DeepEpOp kSequenceOp = DEEPEP_OP_LOW_LATENCY_DISPATCH;

class Sequence : public Operation {
 public:
  // `mask` names ranks to leave out, and takes those that do not come; NULL: their absence is a
  // fault.
  DEEPEP_DEVICE Sequence(const DeepEpContext& context, DeepEpOp op, int phases, int32_t* mask)
      : Operation(context, op, state_of(context), number(context, op, phases)), mask_(mask) {}

  DEEPEP_DEVICE int half() const { return static_cast<int>(epoch() & 1); }
  DEEPEP_DEVICE bool is_masked(int peer) const {
    return mask_ != nullptr && arch::load_flag(mask_ + peer) != 0;
  }

  // Waits as Operation::wait does; a peer that does not come is masked where that is allowed.
  template <class Ready>
  DEEPEP_DEVICE bool await(const uint64_t* word, int peer, DeepEpPhase phase, uint64_t expected,
                           Ready ready, uint64_t* seen) {
    if (arrives(word, ready, seen, [this] { return disagrees(); })) return true;
    if (disagrees()) {
      failed_ = true;
    } else if (mask_ != nullptr && !interrupted_) {
      arch::store_flag(mask_ + peer, 1);
    } else {
      fail(absence(), phase, peer, expected, *seen);
    }
    return false;
  }

  // Peers do something else, and so do not send what this operation waits for. A thread that sees
  // it says so, and the waits of all end.
  DEEPEP_DEVICE void disagree() const {
    arch::store_flag(&state()->disagrees, static_cast<int32_t>(epoch() | 1));
  }
  DEEPEP_DEVICE bool disagrees() const {
    return arch::load_flag(&state()->disagrees) == static_cast<int32_t>(epoch() | 1);
  }

  // ---- Places in the workspace of `rank`, as mapped here

  DEEPEP_DEVICE char* workspace(int rank) const {
    return static_cast<char*>(context().workspaces[rank]);
  }
  DEEPEP_DEVICE uint64_t* heads(int rank, int source) const {
    const CellLayout cells(context().num_ranks);
    return words(rank, cells.heads) + (half() * context().num_ranks + source) * kHeadCells;
  }
  DEEPEP_DEVICE uint64_t* counts(int rank, int source) const {
    const CellLayout cells(context().num_ranks);
    return words(rank, cells.counts) +
           (half() * context().num_ranks + source) * DEEPEP_MAX_LOW_LATENCY_EXPERTS;
  }
  DEEPEP_DEVICE uint64_t* ready(int rank) const {
    const CellLayout cells(context().num_ranks);
    return words(rank, cells.ready) + half() * DEEPEP_MAX_LOW_LATENCY_EXPERTS;
  }
  DEEPEP_DEVICE char* data(int rank) const {
    const int64_t bytes =
        half_bytes(context().num_ranks, static_cast<int64_t>(context().workspace_bytes));
    return workspace(rank) + CellLayout(context().num_ranks).total + half() * bytes;
  }

  // ---- Begin and end

  // Until every peer has finished with what this half held before.
  template <class Team>
  DEEPEP_DEVICE bool begin(Team block, int num_ranks) {
    const uint64_t before = state()->outstanding[half()];
    if (before == 0) return true;
    for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
      await_done(peer, before, DEEPEP_PHASE_REUSE);
    }
    return ok(block);
  }

  // After the last block's arrival: everything is on its way.
  template <class Team>
  DEEPEP_DEVICE void close_send(Team block) const {
    block.sync();
    if (block.lane() != 0) return;
    OpState* s = state();
    s->staged = 0;
    s->outstanding[half()] = epoch();
    s->pending[op() == DEEPEP_OP_LOW_LATENCY_COMBINE] = epoch();
    arch::store_relaxed(&s->epoch, epoch());
  }

  // Tells the peers that this rank has finished: it writes nothing more to their memory, and reads
  // nothing more of theirs.
  template <class Team>
  DEEPEP_DEVICE void send_done(Team block, int num_ranks) const {
    for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
      if (is_masked(peer)) continue;
      arch::store_release(&control(peer)->done[done_row()][rank()],
                          epoch());  // acquired by await_done at the peer
    }
  }
  // For all peers; adds the time that each took to `wait_stats` unless that is NULL.
  template <class Team>
  DEEPEP_DEVICE bool await_all_done(Team block, int num_ranks, int64_t* wait_stats) {
    start_phase();
    for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
      const uint64_t start = wait_stats != nullptr ? arch::now_ns() : 0;
      await_done(peer, epoch(), DEEPEP_PHASE_DONE);
      if (wait_stats == nullptr) continue;
      arch::fetch_add(wait_stats + peer, static_cast<int64_t>(arch::now_ns() - start));
    }
    return ok(block);
  }
  DEEPEP_DEVICE bool await_done(int peer, uint64_t epoch, DeepEpPhase phase) {
    if (is_masked(peer)) return false;
    uint64_t seen;
    return await(
        &own()->done[done_row()][peer], peer, phase, epoch,
        [=](uint64_t value) { return value >= epoch; }, &seen);
  }

  // After the last block's arrival: this rank has received. `settled`: the peers have as well.
  template <class Team>
  DEEPEP_DEVICE void close_receive(Team block, bool settled) const {
    block.sync();
    if (block.lane() != 0) return;
    state()->arrivals = 0;
    if (settled) state()->outstanding[half()] = 0;
  }

  // ---- What the first block tells the others of its grid: who has come, and with how many rows

  template <class Team>
  DEEPEP_DEVICE void set_collected(Team block) const {
    block.sync();
    if (block.lane() != 0) return;
    arch::store_release(&state()->collected, epoch());  // acquired by await_collected
  }
  // The first block gives up its own waits, of which it has at most four before this one.
  template <class Team>
  DEEPEP_DEVICE bool await_collected(Team block) {
    const uint64_t expected = epoch();
    if (block.lane() == 0) {
      bool came = false;
      for (int phase = 0; phase < 4 && !came && !has_failed(); ++phase) {
        start_phase();
        uint64_t seen;
        came = arrives(&state()->collected, [=](uint64_t v) { return v == expected; }, &seen);
      }
      failed_ |= !came;
    }
    start_phase();
    return ok(block);
  }

 private:
  // Of each half its own: two operations on their way may be received in either order.
  DEEPEP_DEVICE int done_row() const {
    return half() == 0 ? DEEPEP_OP_LOW_LATENCY_DISPATCH : DEEPEP_OP_LOW_LATENCY_COMBINE;
  }
  static DEEPEP_DEVICE OpState* state_of(const DeepEpContext& context) {
    return &static_cast<Control*>(context.control[context.rank])->ops[kSequenceOp];
  }
  static DEEPEP_DEVICE uint64_t number(const DeepEpContext& context, DeepEpOp op, int phases) {
    const OpState* state = state_of(context);
    if (phases & DEEPEP_SEND) return arch::load_relaxed(&state->epoch) + 1;
    return state->pending[op == DEEPEP_OP_LOW_LATENCY_COMBINE];
  }
  DEEPEP_DEVICE uint64_t* words(int rank, int64_t offset) const {
    return reinterpret_cast<uint64_t*>(workspace(rank) + offset);
  }

  int32_t* mask_;
};

}  // namespace deepep

#endif  // KERNELS_DEVICE_LOWLATENCY_SEQUENCE_H_
