// Low-latency combine: each token's rows, weighted, summed in FP32 in the order of its selections
// and rounded once.
//
// Every owner of experts decides for itself how its rows get to the tokens' ranks: it leaves them
// where they are and says where that is (pull), or sends them to the ranks' workspaces (push). A
// cell for each expert says which, and that the rows are there.
#ifndef KERNELS_DEVICE_LOWLATENCY_COMBINE_H_
#define KERNELS_DEVICE_LOWLATENCY_COMBINE_H_

#include "kernels/device/experts.h"
#include "kernels/device/intranode/handshake.h"
#include "kernels/device/lowlatency/cells.h"
#include "kernels/device/lowlatency/logfmt.h"

namespace deepep {

constexpr uint32_t kPushed = kCellValueMask;  // a ready cell's value; others are the first row

struct CombineJob {
  const DeepEpLowLatencyCombineArgs& args;
  int num_ranks;
  int64_t row_bytes;
  ExpertSplit split;
  int64_t expert_rows;

  DEEPEP_DEVICE CombineJob(const DeepEpLowLatencyCombineArgs& call, int ranks, int64_t bytes)
      : args(call),
        num_ranks(ranks),
        row_bytes(bytes),
        split(call.num_experts, ranks),
        expert_rows(int64_t{ranks} * call.max_tokens) {}

  DEEPEP_DEVICE bool is_pulled() const { return args.at_x != DEEPEP_NO_LOCATOR; }
  DEEPEP_DEVICE Head head() const {
    return {args.at_x,
            pack_signature(row_bytes, 0, args.num_topk, args.idx_bytes, args.num_experts),
            static_cast<uint32_t>(args.max_tokens)};
  }
  DEEPEP_DEVICE int hidden() const { return static_cast<int>(row_bytes / 2); }
  // Slots of the tokens' rank: [max_tokens][num_topk].
  DEEPEP_DEVICE char* slot(const Sequence& op, int rank, int64_t index) const {
    return op.data(rank) + index * slot_bytes(hidden(), args.use_logfmt != 0);
  }
  // Where the BF16 row of a slot begins, once it was decoded if that was needed.
  DEEPEP_DEVICE const char* slot_row(const Sequence& op, int rank, int64_t index) const {
    char* start = slot(op, rank, index);
    return args.use_logfmt ? log_group(start, hidden(), 0) : start;
  }
};

// Tells every rank this one's head and, for each expert here, that its rows can be read: where they
// begin, or kPushed.
template <class Team>
DEEPEP_DEVICE void send_ready(const Sequence& op, Team block, const CombineJob& job) {
  const int first = job.split.begin(op.rank()), num_local = job.split.count(op.rank());
  const int num_heads = num_head_cells(job.num_ranks), num_ready = num_local * job.num_ranks;
  fence_for(block, num_heads > num_ready ? num_heads : num_ready);
  send_heads(op, block, job.num_ranks, job.head());
  for (int i = block.lane(); i < num_ready; i += block.size()) {
    const int e = i / job.num_ranks, peer = i % job.num_ranks;
    if (op.is_masked(peer)) continue;
    const int64_t range = job.args.layout_range[i];
    const uint32_t value = job.is_pulled() ? static_cast<uint32_t>(range >> 32) : kPushed;
    arch::store_cell(op.ready(peer) + first + e, make_cell(op.epoch(), value));
  }
}

// Sends the rows of all experts here to the slots of their tokens.
template <class Team>
DEEPEP_DEVICE void push_rows(const Sequence& op, Team team, const CombineJob& job) {
  const DeepEpLowLatencyCombineArgs& args = job.args;
  const auto grid = arch::this_grid();
  const int num_blocks = job.split.count(op.rank()) * job.num_ranks;  // of rows
  const int sharing =
      num_blocks == 0 || grid.num_teams() <= num_blocks ? 1 : grid.num_teams() / num_blocks;
  arch::RowSender sender(team, job.row_bytes);
  for (int item = grid.team(); item < num_blocks * sharing; item += grid.num_teams()) {
    const int at = item / sharing, e = at / job.num_ranks, peer = at % job.num_ranks;
    if (op.is_masked(peer)) continue;
    const int64_t range = args.layout_range[at];
    const int64_t count = range & 0xffffffff, first = e * job.expert_rows + (range >> 32);
    for (int64_t i = item % sharing; i < count; i += sharing) {
      const char* from = static_cast<const char*>(args.x) + (first + i) * job.row_bytes;
      char* to = job.slot(op, peer, args.recv_source[first + i] >> 32);
      if (args.use_logfmt) {
        encode_row(team, reinterpret_cast<const uint16_t*>(from), to, job.hidden());
        continue;
      }
      const int64_t chunk = sender.chunk_bytes(job.row_bytes);
      for (int64_t done = 0; done < job.row_bytes; done += chunk) {
        const int64_t left = job.row_bytes - done;
        sender.fetch(team, from + done, left < chunk ? left : chunk);
        if (team.lane() == 0) sender.put(to + done);
        sender.commit(team);
      }
    }
  }
  sender.finish(team);
}

// Waits for the heads of all ranks, as await_heads does, and until the rows of all experts can be
// read. Both at once: each look takes as long as all of them.
template <class Team>
DEEPEP_DEVICE bool await_ready(Sequence& op, Team block, const CombineJob& job, char** places,
                               int64_t* wait_stats) {
  const auto await_experts = [&] {
    // From the last lane down, since the first ones look at heads.
    for (int i = block.size() - 1 - block.lane(); i < job.args.num_experts; i += block.size()) {
      const int owner = job.split.owner(i);
      if (op.is_masked(owner)) continue;
      const uint64_t start = wait_stats != nullptr ? arch::now_ns() : 0;
      uint32_t value;
      op.start_phase();
      await_cell(op, op.ready(op.rank()) + i, owner, DEEPEP_PHASE_ROWS, &value);
      if (wait_stats == nullptr) continue;
      arch::fetch_add(wait_stats + owner, static_cast<int64_t>(arch::now_ns() - start));
    }
  };
  return await_heads(op, block, job.num_ranks, job.head(), places, wait_stats, await_experts);
}

// Decodes the slots of this rank's selections; their rows are there.
template <class Team>
DEEPEP_DEVICE void decode_slots(const Sequence& op, Team team, const CombineJob& job) {
  const DeepEpLowLatencyCombineArgs& args = job.args;
  const auto grid = arch::this_grid();
  const int64_t count = int64_t{args.num_tokens} * args.num_topk;
  for (int64_t i = grid.team(); i < count; i += grid.num_teams()) {
    const int64_t id = load_id(args.topk_idx, args.idx_bytes, i);
    if (id < 0 || id >= args.num_experts) continue;
    const int expert = static_cast<int>(id);
    const uint64_t cell = arch::load_cell(op.ready(op.rank()) + expert);
    if (op.is_masked(job.split.owner(expert)) || !cell_is_of(cell, op.epoch())) continue;
    decode_row(team, job.slot(op, op.rank(), i), job.hidden());
  }
}

// Where a token's rows lie and where its sum goes; what arch::gather_rows asks.
struct ChoicePlan {
  static constexpr bool kWeighted = true;
  const Sequence& op;
  const CombineJob& job;
  char* const* places;  // [rank] of the owners' rows

  DEEPEP_DEVICE const void* bias(int64_t, int) const { return nullptr; }
  DEEPEP_DEVICE const void* row(int64_t token, int k) const {
    const DeepEpLowLatencyCombineArgs& args = job.args;
    const int64_t i = token * args.num_topk + k;
    const int64_t id = load_id(args.topk_idx, args.idx_bytes, i);
    const int32_t index = args.send_index[i];  // not behind the id: the two are loaded together
    if (id < 0 || id >= args.num_experts) return nullptr;
    const int expert = static_cast<int>(id), owner = job.split.owner(expert);
    if (op.is_masked(owner)) return nullptr;
    const uint64_t cell = arch::load_cell(op.ready(op.rank()) + expert);
    if (!cell_is_of(cell, op.epoch())) return nullptr;  // of an owner that was masked meanwhile
    if (cell_value(cell) == kPushed) return job.slot_row(op, op.rank(), i);
    const int64_t first = (expert - job.split.begin(owner)) * job.expert_rows + cell_value(cell);
    return places[owner] + (first + index) * job.row_bytes;
  }
  DEEPEP_DEVICE float weight(int64_t token, int k) const {
    return job.args.topk_weights[token * job.args.num_topk + k];
  }
  DEEPEP_DEVICE void* out(int64_t token) const {
    return static_cast<char*>(job.args.out) + token * job.row_bytes;
  }
};

}  // namespace deepep

#endif  // KERNELS_DEVICE_LOWLATENCY_COMBINE_H_
