// Low-latency dispatch: every token once to each of its experts, in FP8 if asked for.
//
// Two ways, which differ in where a row is written and in what is known before. Direct: the ranks
// exchange counts first, then rows go to their place in the receivers' tensors. Collected: rows go
// to the receivers' workspaces at once, which needs nobody's answer; receivers put them in their
// place. The way that the cells take is the same.
#ifndef KERNELS_DEVICE_LOWLATENCY_DISPATCH_H_
#define KERNELS_DEVICE_LOWLATENCY_DISPATCH_H_

#include "kernels/device/experts.h"
#include "kernels/device/intranode/handshake.h"
#include "kernels/device/lowlatency/cells.h"

namespace deepep {

// What the phases of one call share. Times: T tokens, K choices.
struct DispatchJob {
  const DeepEpLowLatencyDispatchArgs& args;
  int num_ranks;
  int64_t row_bytes;    // as received
  ExpertSplit split;
  int64_t expert_rows;  // rows that a received expert has room for

  DEEPEP_DEVICE DispatchJob(const DeepEpLowLatencyDispatchArgs& call, int ranks, int64_t bytes)
      : args(call),
        num_ranks(ranks),
        row_bytes(bytes),
        split(call.num_experts, ranks),
        expert_rows(int64_t{ranks} * call.max_tokens) {}

  // The expert of a selection, or -1.
  DEEPEP_DEVICE int expert(int64_t i) const {
    const int64_t id = load_id(args.topk_idx, args.idx_bytes, i);
    return id >= 0 && id < args.num_experts ? static_cast<int>(id) : -1;
  }
  DEEPEP_DEVICE Head head(DeepEpLocator at) const {
    return {
        at,
        pack_signature(row_bytes, args.num_scales, args.num_topk, args.idx_bytes, args.num_experts),
        static_cast<uint32_t>(args.max_tokens)};
  }
};

// ---- Counts

// Numbers this rank's rows for each expert, in token order, and counts them. By every block: none
// has to wait for another.
template <class Team>
DEEPEP_DEVICE void number_rows(Team block, const DispatchJob& job) {
  const int count = job.args.num_tokens * job.args.num_topk;
  arch::number_choices(
      block, [&](int i) { return job.expert(i); }, count, job.args.num_experts, job.args.send_index,
      job.args.send_counts);
}

// Tells the peers this rank's counts. Direct: of all experts, since a rank's rows lie behind those
// of the ranks before it. Collected: of the receiver's, when the rows are there.
template <class Team>
DEEPEP_DEVICE void send_counts(const Sequence& op, Team block, const DispatchJob& job,
                               bool direct) {
  const int num_experts = job.args.num_experts;
  if (!direct) fence_for(block, num_experts);  // of the rows; a count by itself announces nothing
  const int64_t cells = direct ? int64_t{job.num_ranks} * num_experts : num_experts;
  for (int64_t i = block.lane(); i < cells; i += block.size()) {
    const int expert = static_cast<int>(i % num_experts);
    const int peer = direct ? static_cast<int>(i / num_experts) : job.split.owner(expert);
    if (op.is_masked(peer)) continue;
    arch::store_cell(op.counts(peer, op.rank()) + expert,
                     make_cell(op.epoch(), job.args.send_counts[expert]));
  }
}

// One expert's cells of some sources, looked at together.
constexpr int kCellBatch = 8;
struct CellBatch {
  uint64_t cell[kCellBatch] = {};

  DEEPEP_DEVICE CellBatch(const Sequence& op, int expert, int first, int end) {
    DEEPEP_UNROLL
    for (int i = 0; i < kCellBatch; ++i) {
      if (first + i < end) cell[i] = arch::load_cell(op.counts(op.rank(), first + i) + expert);
    }
  }
};

// Rows of `expert` that come from the ranks before this one.
DEEPEP_DEVICE int32_t rows_before(Sequence& op, int expert) {
  int32_t sum = 0;
  for (int first = 0; first < op.rank(); first += kCellBatch) {
    const CellBatch seen(op, expert, first, op.rank());
    DEEPEP_UNROLL
    for (int i = 0; i < kCellBatch; ++i) {
      const int source = first + i;
      if (source >= op.rank()) break;
      uint32_t value = cell_value(seen.cell[i]);
      if (!cell_is_of(seen.cell[i], op.epoch())) {
        await_cell(op, op.counts(op.rank(), source) + expert, source, DEEPEP_PHASE_COUNTS, &value);
      }
      sum += static_cast<int32_t>(value);
    }
  }
  return sum;
}

// The counts of this rank's experts, and where each source's rows begin. Waits for every source:
// with `direct` for its count, else for its rows.
template <class Team>
DEEPEP_DEVICE bool collect_counts(Sequence& op, Team block, const DispatchJob& job) {
  const DeepEpLowLatencyDispatchArgs& args = job.args;
  const int first = job.split.begin(op.rank()), num_local = job.split.count(op.rank());
  const DeepEpPhase phase = args.direct ? DEEPEP_PHASE_COUNTS : DEEPEP_PHASE_ROWS;
  op.start_phase();
  for (int i = block.lane(); i < num_local * job.num_ranks; i += block.size()) {
    const int source = i % job.num_ranks, e = i / job.num_ranks;
    if (op.is_masked(source)) continue;
    const uint64_t start = args.wait_stats != nullptr ? arch::now_ns() : 0;
    uint32_t value;
    await_cell(op, op.counts(op.rank(), source) + first + e, source, phase, &value);
    if (args.wait_stats != nullptr && !args.direct) {
      arch::fetch_add(args.wait_stats + source, static_cast<int64_t>(arch::now_ns() - start));
    }
  }
  if (!op.ok(block)) return false;
  // A source that was masked meanwhile has sent nothing, whatever some of its cells say.
  for (int e = block.lane(); e < num_local; e += block.size()) {
    int64_t sum = 0;
    for (int base = 0; base < job.num_ranks; base += kCellBatch) {
      const CellBatch seen(op, first + e, base, job.num_ranks);
      DEEPEP_UNROLL
      for (int i = 0; i < kCellBatch; ++i) {
        const int source = base + i;
        if (source >= job.num_ranks) break;
        const bool sent = !op.is_masked(source) && cell_is_of(seen.cell[i], op.epoch());
        const int64_t count = sent ? static_cast<int64_t>(cell_value(seen.cell[i])) : 0;
        args.layout_range[int64_t{e} * job.num_ranks + source] = sum << 32 | count;
        sum += count;
      }
    }
    args.recv_count[e] = static_cast<int32_t>(sum);
    if (args.recv_stats != nullptr) args.recv_stats[e] += static_cast<int32_t>(sum);
  }
  block.sync();
  return true;
}

// ---- Where rows go

// One selection of a token: a row of the owner's tensors (direct) or of its workspace (collected).
struct Choice {
  int rank;  // -1: none
  int expert;  // as the owner counts
  int64_t row;
};

// The receivers' tensors. They lie behind each other in one piece of memory, in this order.
struct DirectPlaces {
  const DispatchJob& job;
  char* const* base;  // [rank]

  DEEPEP_DEVICE Choice find(Sequence& op, int64_t i) const {
    const int expert = job.expert(i);
    if (expert < 0) return {-1, 0, 0};
    const int rank = job.split.owner(expert);
    return {rank, expert - job.split.begin(rank), job.args.send_index[i] + rows_before(op, expert)};
  }
  DEEPEP_DEVICE int64_t index(const Choice& c) const { return c.expert * job.expert_rows + c.row; }
  DEEPEP_DEVICE int64_t rows_of(int rank) const { return job.split.count(rank) * job.expert_rows; }
  DEEPEP_DEVICE int64_t scales_at(int rank) const {
    return round_up(rows_of(rank) * job.row_bytes, kPartAlignment);
  }
  DEEPEP_DEVICE int64_t sources_at(int rank) const {
    return scales_at(rank) +
           round_up(rows_of(rank) * job.args.num_scales * int64_t{4}, kPartAlignment);
  }

  DEEPEP_DEVICE char* row(const Choice& c) const { return base[c.rank] + index(c) * job.row_bytes; }
  DEEPEP_DEVICE uint32_t* scale(const Choice& c, int i) const {
    auto* scales = reinterpret_cast<uint32_t*>(base[c.rank] + scales_at(c.rank));
    return scales + (int64_t{c.expert} * job.args.num_scales + i) * job.expert_rows + c.row;
  }
  DEEPEP_DEVICE int64_t* source(const Choice& c) const {
    return reinterpret_cast<int64_t*>(base[c.rank] + sources_at(c.rank)) + index(c);
  }
};

// Messages in the receivers' workspaces: [expert][source][max_tokens].
struct MessagePlaces {
  const DispatchJob& job;
  const Sequence& op;
  int64_t bytes;  // of a message

  DEEPEP_DEVICE MessagePlaces(const DispatchJob& dispatch, const Sequence& sequence)
      : job(dispatch),
        op(sequence),
        bytes(message_bytes(dispatch.row_bytes, dispatch.args.num_scales)) {}

  DEEPEP_DEVICE Choice find(const Sequence&, int64_t i) const {
    const int expert = job.expert(i);
    if (expert < 0) return {-1, 0, 0};
    const int rank = job.split.owner(expert);
    if (op.is_masked(rank)) return {-1, 0, 0};
    return {rank, expert - job.split.begin(rank), job.args.send_index[i]};
  }
  DEEPEP_DEVICE char* message(int rank, int expert, int source, int64_t row) const {
    const int64_t at = (int64_t{expert} * job.num_ranks + source) * job.args.max_tokens + row;
    return op.data(rank) + at * bytes;
  }
  DEEPEP_DEVICE char* message(const Choice& c) const {
    return message(c.rank, c.expert, op.rank(), c.row);
  }

  DEEPEP_DEVICE char* row(const Choice& c) const { return message(c) + kMessageHeadBytes; }
  DEEPEP_DEVICE uint32_t* scale(const Choice& c, int i) const {
    return reinterpret_cast<uint32_t*>(row(c) + job.row_bytes) + i;
  }
  DEEPEP_DEVICE int64_t* source(const Choice& c) const {
    return reinterpret_cast<int64_t*>(message(c));
  }
};

// ---- Rows

// The selections of one token, found where they go.
template <class Team, class Places>
DEEPEP_DEVICE arch::Choices<Choice> choices_of(Sequence& op, Team team, const DispatchJob& job,
                                               const Places& places, int64_t token) {
  const int64_t first = token * job.args.num_topk;
  return {team, job.args.num_topk, [&](int k) { return places.find(op, first + k); }};
}

// Beside each row: whose it is, for combine.
template <class Choices, class Places>
DEEPEP_DEVICE void write_sources(const Choices& choices, const DispatchJob& job,
                                 const Places& places, int64_t token) {
  choices.each_by_one([&](int k, const Choice& c) {
    *places.source(c) = token | (token * job.args.num_topk + k) << 32;
  });
}

// Rows that have the payload's type already, and their scales.
template <class Team, class Places>
DEEPEP_DEVICE void copy_rows(Sequence& op, Team team, const DispatchJob& job,
                             const Places& places) {
  const DeepEpLowLatencyDispatchArgs& args = job.args;
  const auto grid = arch::this_grid();
  arch::RowSender sender(team, job.row_bytes);
  for (int64_t token = grid.team(); token < args.num_tokens; token += grid.num_teams()) {
    const auto choices = choices_of(op, team, job, places, token);
    const char* from = static_cast<const char*>(args.x) + token * job.row_bytes;
    const int64_t chunk = sender.chunk_bytes(job.row_bytes);
    for (int64_t done = 0; done < job.row_bytes; done += chunk) {
      const int64_t left = job.row_bytes - done;
      sender.fetch(team, from + done, left < chunk ? left : chunk);
      choices.each_by_one([&](int, const Choice& c) { sender.put(places.row(c) + done); });
      sender.commit(team);
    }
    write_sources(choices, job, places, token);
    if (args.num_scales == 0) continue;
    const auto* scales =
        static_cast<const uint32_t*>(args.x_scales) + token * args.scale_token_stride;
    choices.each_pair(
        team, args.num_scales, [&](int i) { return scales[i * args.scale_group_stride]; },
        [&](const Choice& c, int i, uint32_t scale) { *places.scale(c, i) = scale; });
  }
  sender.finish(team);
}

// BF16 rows, cast to FP8 on the way; a piece of a token's row at a time, which all its copies are
// written from.
template <class Team, class Places>
DEEPEP_DEVICE void cast_rows(Sequence& op, Team team, const DispatchJob& job,
                             const Places& places) {
  const DeepEpLowLatencyDispatchArgs& args = job.args;
  const auto grid = arch::this_grid();
  const int hidden = static_cast<int>(job.row_bytes);
  const int num_pieces = (hidden + arch::kCastPiece - 1) / arch::kCastPiece;
  const bool rounded = args.cast != DEEPEP_CAST_FP8, packed = args.cast == DEEPEP_CAST_FP8_UE8M0;
  const int64_t count = int64_t{args.num_tokens} * num_pieces;
  for (int64_t item = grid.team(); item < count; item += grid.num_teams()) {
    const int64_t token = item / num_pieces;
    const int piece = static_cast<int>(item % num_pieces), begin = piece * arch::kCastPiece;
    const auto* from = static_cast<const uint16_t*>(args.x) + token * hidden + begin;
    const int size = hidden - begin < arch::kCastPiece ? hidden - begin : arch::kCastPiece;
    const arch::CastPiece cast(team, from, size, rounded);  // before the wait for counts
    const auto choices = choices_of(op, team, job, places, token);
    choices.each_by_all([&](const Choice& c) { cast.store(team, places.row(c) + begin); });
    if (piece == 0) write_sources(choices, job, places, token);
    const int first = piece * (arch::kCastPiece / DEEPEP_FP8_GROUP);
    if (packed) {
      const uint32_t word = cast.packed_scales();
      choices.each_by_one([&](int, const Choice& c) { *places.scale(c, first / 4) = word; });
      continue;
    }
    const int groups = (size + DEEPEP_FP8_GROUP - 1) / DEEPEP_FP8_GROUP;
    choices.each_pair(
        team, groups, [&](int i) { return cast.scale(i); },
        [&](const Choice& c, int i, uint32_t scale) { *places.scale(c, first + i) = scale; });
  }
}

// ---- Collecting

// Moves the messages of this rank's workspace to their place. Every source's rows of an expert are
// shared by as many teams as there are.
template <class Team>
DEEPEP_DEVICE void collect_rows(const Sequence& op, Team team, const DispatchJob& job) {
  const DeepEpLowLatencyDispatchArgs& args = job.args;
  const MessagePlaces from(job, op);
  const auto grid = arch::this_grid();
  const int num_blocks = job.split.count(op.rank()) * job.num_ranks;  // of rows
  const int sharing =
      num_blocks == 0 || grid.num_teams() <= num_blocks ? 1 : grid.num_teams() / num_blocks;
  arch::RowSender sender(team, job.row_bytes);
  for (int item = grid.team(); item < num_blocks * sharing; item += grid.num_teams()) {
    const int at = item / sharing, e = at / job.num_ranks, source = at % job.num_ranks;
    const int64_t range = args.layout_range[at];
    const int64_t count = range & 0xffffffff, first = range >> 32;
    for (int64_t i = item % sharing; i < count; i += sharing) {
      const char* message = from.message(op.rank(), e, source, i);
      const int64_t row = e * job.expert_rows + first + i;
      const int64_t chunk = sender.chunk_bytes(job.row_bytes);
      for (int64_t done = 0; done < job.row_bytes; done += chunk) {
        const int64_t left = job.row_bytes - done;
        sender.fetch(team, message + kMessageHeadBytes + done, left < chunk ? left : chunk);
        if (team.lane() == 0) {
          sender.put(static_cast<char*>(args.recv_x) + row * job.row_bytes + done);
        }
        sender.commit(team);
      }
      if (team.lane() == 0) args.recv_source[row] = *reinterpret_cast<const int64_t*>(message);
      const auto* scales =
          reinterpret_cast<const uint32_t*>(message + kMessageHeadBytes + job.row_bytes);
      auto* to = static_cast<uint32_t*>(args.recv_scales) +
                 int64_t{e} * args.num_scales * job.expert_rows + first + i;
      for (int s = team.lane(); s < args.num_scales; s += team.size()) {
        to[s * job.expert_rows] = scales[s];
      }
    }
  }
  sender.finish(team);
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_LOWLATENCY_DISPATCH_H_
