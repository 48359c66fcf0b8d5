// The count exchange: one push to every peer, one wait, and every rank knows the whole traffic
// matrix, hence the row where each of its tokens goes and how many rows it will receive.
#ifndef KERNELS_DEVICE_INTRANODE_NOTIFY_H_
#define KERNELS_DEVICE_INTRANODE_NOTIFY_H_

#include "kernels/device/experts.h"
#include "kernels/device/intranode/handshake.h"

namespace deepep {

// A count that is its own flag. 32 bits of the epoch are enough: a cell is at most two epochs old.
DEEPEP_DEVICE uint64_t make_cell(uint64_t epoch, int32_t value) {
  return epoch << 32 | static_cast<uint32_t>(value);
}
DEEPEP_DEVICE int32_t cell_value(uint64_t cell) { return static_cast<int32_t>(cell); }
DEEPEP_DEVICE bool cell_is_of(uint64_t cell, uint64_t epoch) {
  return cell >> 32 == (epoch & 0xffffffffu);
}

DEEPEP_DEVICE const uint64_t* count_cells(const Operation& op, int source) {
  return op.own()->counts[op.epoch() & 1][source];
}

DEEPEP_DEVICE uint64_t wait_cell(Operation& op, int source, int index) {
  const uint64_t epoch = op.epoch();
  return op.wait(count_cells(op, source) + index, source, DEEPEP_PHASE_COUNTS, epoch,
                 [=](uint64_t value) { return cell_is_of(value, epoch); });
}

constexpr int kNumExpertsCell = DEEPEP_MAX_RANKS + DEEPEP_MAX_LOCAL_EXPERTS;

// Pushes this rank's row of the traffic matrix, and the selections of the peer's own experts, to
// every peer. A cell carries its epoch, so the stores need no order.
template <class Team>
DEEPEP_DEVICE void push_counts(const Operation& op, Team block, const DeepEpNotifyArgs& args,
                               int num_ranks) {
  const ExpertSplit split(args.num_experts, num_ranks);
  for (int i = block.lane(); i < num_ranks * num_ranks; i += block.size()) {
    const int peer = i / num_ranks, rank = i % num_ranks;
    uint64_t* cells = op.control(peer)->counts[op.epoch() & 1][op.rank()];
    arch::store_relaxed(cells + rank, make_cell(op.epoch(), args.num_tokens_per_rank[rank]));
  }
  for (int e = block.lane(); e < args.num_experts; e += block.size()) {
    const int peer = split.owner(e);
    uint64_t* cells = op.control(peer)->counts[op.epoch() & 1][op.rank()];
    arch::store_relaxed(cells + DEEPEP_MAX_RANKS + e - split.begin(peer),
                        make_cell(op.epoch(), args.num_tokens_per_expert[e]));
  }
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    uint64_t* cells = op.control(peer)->counts[op.epoch() & 1][op.rank()];
    arch::store_relaxed(cells + kNumExpertsCell, make_cell(op.epoch(), args.num_experts));
  }
}

// Compares the number of experts: a rank that knows fewer would never push what this one waits for.
template <class Team>
DEEPEP_DEVICE bool agree_on_experts(Operation& op, Team block, const DeepEpNotifyArgs& args,
                                    int num_ranks) {
  op.start_phase();
  for (int source = block.lane(); source < num_ranks; source += block.size()) {
    const uint64_t cell = wait_cell(op, source, kNumExpertsCell);
    const int32_t theirs = cell_value(cell);
    if (cell_is_of(cell, op.epoch()) && theirs != args.num_experts) {
      op.fail(DEEPEP_MISMATCH, DEEPEP_PHASE_COUNTS, source,
              pack_signature(0, 0, 0, 0, args.num_experts), pack_signature(0, 0, 0, 0, theirs));
    }
  }
  return op.ok(block);
}

// Sums what came: [i][r] of rank_prefix is the number of rows that rank r gets from ranks 0..i.
template <class Team>
DEEPEP_DEVICE bool sum_counts(Operation& op, Team block, const DeepEpNotifyArgs& args,
                              int num_ranks) {
  if (!agree_on_experts(op, block, args, num_ranks)) return false;
  op.start_phase();
  const int num_local = ExpertSplit(args.num_experts, num_ranks).count(op.rank());
  const int per_source = num_ranks + num_local;
  for (int i = block.lane(); i < num_ranks * per_source; i += block.size()) {
    const int source = i / per_source, at = i % per_source;
    wait_cell(op, source, at < num_ranks ? at : DEEPEP_MAX_RANKS + at - num_ranks);
  }
  if (!op.ok(block)) return false;
  for (int rank = block.lane(); rank < num_ranks; rank += block.size()) {
    int32_t sum = 0;
    for (int source = 0; source < num_ranks; ++source) {
      sum += cell_value(arch::load_relaxed(count_cells(op, source) + rank));
      args.rank_prefix[source * num_ranks + rank] = sum;
    }
  }
  for (int e = block.lane(); e < num_local; e += block.size()) {
    int32_t sum = 0;
    for (int source = 0; source < num_ranks; ++source) {
      sum += cell_value(arch::load_relaxed(count_cells(op, source) + DEEPEP_MAX_RANKS + e));
    }
    args.num_recv_per_expert[e] = sum;
    if (args.counts != nullptr) args.counts->per_expert[e] = sum;
  }
  return true;
}

// Where each of this rank's tokens goes in the tensor of `peer`: behind the rows of the ranks
// before this one, in token order.
template <class Team>
DEEPEP_DEVICE void place_rows(Operation& op, Team block, const DeepEpNotifyArgs& args,
                              int num_ranks, int peer) {
  for (int source = block.lane(); source < op.rank(); source += block.size()) {
    wait_cell(op, source, peer);
  }
  if (!op.ok(block)) return;
  int32_t first = 0;
  for (int source = 0; source < op.rank(); ++source) {
    first += cell_value(arch::load_relaxed(count_cells(op, source) + peer));
  }
  const int32_t end = arch::number_flags(block, args.is_token_in_rank + peer, args.send_row + peer,
                                         args.num_tokens, num_ranks, first);
  // The peers were told another number: their rows would not lie where they think.
  const int32_t told = args.num_tokens_per_rank[peer];
  if (block.lane() == 0 && end - first != told) {
    op.fail(DEEPEP_INVALID_ARGUMENT, DEEPEP_PHASE_COUNTS, peer, static_cast<uint64_t>(told),
            static_cast<uint64_t>(end - first));
  }
}

// Gives the totals to the host. The ticket goes last (release); runtime's wait_counts acquires it.
template <class Team>
DEEPEP_DEVICE void report_counts(const Operation& op, Team block, const DeepEpNotifyArgs& args,
                                 int num_ranks) {
  if (args.counts == nullptr) return;
  block.sync();
  if (block.lane() != 0) return;
  const ExpertSplit split(args.num_experts, num_ranks);
  args.counts->num_recv_tokens = args.rank_prefix[(num_ranks - 1) * num_ranks + op.rank()];
  args.counts->num_local_experts = split.count(op.rank());
  arch::store_release(&args.counts->ticket, args.ticket);
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_NOTIFY_H_
