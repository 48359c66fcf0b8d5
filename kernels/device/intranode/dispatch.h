// Dispatch inside one memory domain: every row is read once and written once, straight to the row
// of each receiver's tensor that notify (or a cached handle) has fixed. No queue, no copy, no
// atomics.
#ifndef KERNELS_DEVICE_INTRANODE_DISPATCH_H_
#define KERNELS_DEVICE_INTRANODE_DISPATCH_H_

#include "kernels/device/experts.h"
#include "kernels/device/intranode/handshake.h"

namespace deepep {

// The parts of a received row, in the order of Entry::at.
enum ReceivePart { kPartX, kPartScales, kPartTopkIdx, kPartTopkWeights, kPartSrcIdx };

DEEPEP_DEVICE int32_t num_received(const DeepEpDispatchArgs& args, int rank, int num_ranks) {
  return args.rank_prefix[(num_ranks - 1) * num_ranks + rank];
}

// A peer's receive tensors as mapped here.
struct Destination {
  char* part[5];
  int64_t capacity;  // rows
};

// Looks the peers' published addresses up once for the whole block.
template <class Team>
DEEPEP_DEVICE void find_destinations(const Operation& op, Team block, int num_ranks,
                                     Destination* destinations) {
  for (int i = block.lane(); i < num_ranks * 5; i += block.size()) {
    const int peer = i / 5, part = i % 5;
    const Entry& entry = op.own()->entries[op.op()][peer];
    const DeepEpLocator at = entry.at[part];
    destinations[peer].part[part] = at == DEEPEP_NO_LOCATOR ? nullptr : op.locate(peer, at);
    destinations[peer].capacity = static_cast<int64_t>(entry.capacity);
  }
  block.sync();
}

// The ranks that need `token`. A receiver whose tensors are too small says so itself
// (check_capacity); nobody writes past them.
template <int kNumRanks, class Team>
DEEPEP_DEVICE arch::Targets<kNumRanks> targets_of(Team team, const DeepEpDispatchArgs& args,
                                                  const Destination* to, int num_ranks, int first,
                                                  int64_t token) {
  return {team, args.send_row + token * num_ranks, num_ranks, first,
          [to](int rank) { return to[rank].capacity; }};
}

// Sends one token's row to every rank that needs it.
template <class Team, class Targets>
DEEPEP_DEVICE void send_row(Team team, arch::RowSender& sender, const DeepEpDispatchArgs& args,
                            const Destination* to, const Targets& targets, int64_t row_bytes,
                            int64_t token) {
  const char* row_start = static_cast<const char*>(args.x) + token * row_bytes;
  const int64_t chunk = sender.chunk_bytes(row_bytes);
  for (int64_t done = 0; done < row_bytes; done += chunk) {
    const int64_t left = row_bytes - done;
    sender.fetch(team, row_start + done, left < chunk ? left : chunk);
    targets.each_by_one(
        [&](int rank, int64_t row) { sender.put(to[rank].part[kPartX] + row * row_bytes + done); });
    sender.commit(team);
  }
}

// Whether anything travels beside the rows and their scales; the same on all ranks.
DEEPEP_DEVICE bool has_routing(const DeepEpDispatchArgs& args, const Destination* to,
                               int num_ranks) {
  bool wanted = args.num_topk > 0;
  for (int rank = 0; rank < num_ranks; ++rank) wanted |= to[rank].part[kPartSrcIdx] != nullptr;
  return wanted;
}

// What travels beside the row: ids as the receiver counts its experts, weights, and the token's
// index on its source rank. `first_rank`: of the memory domain, among all that experts are split
// over.
template <class Team, class Targets>
DEEPEP_DEVICE void send_routing(Team team, const DeepEpDispatchArgs& args, const Destination* to,
                                const Targets& targets, const ExpertSplit& split, int first_rank,
                                int64_t token, int32_t index) {
  targets.each_by_one([&](int rank, int64_t row) {
    auto* sources = reinterpret_cast<int32_t*>(to[rank].part[kPartSrcIdx]);
    if (sources != nullptr) sources[row] = index;
  });
  if (args.num_topk == 0) return;
  for (int base = 0; base < args.num_topk; base += team.size()) {
    const int k = base + team.lane();
    const bool inside = k < args.num_topk;
    const int64_t from = token * args.num_topk + k;
    const int64_t id = inside ? load_id(args.topk_idx, args.idx_bytes, from) : -1;
    const float weight = inside ? args.topk_weights[from] : 0.0f;
    targets.each_by_all([&](int rank, int64_t row) {
      if (!inside) return;
      const int begin = split.begin(first_rank + rank);
      const bool here = id >= begin && id < begin + split.count(first_rank + rank);
      const int64_t at = row * args.num_topk + k;
      store_id(to[rank].part[kPartTopkIdx], args.idx_bytes, at, here ? id - begin : -1);
      reinterpret_cast<float*>(to[rank].part[kPartTopkWeights])[at] = here ? weight : 0.0f;
    });
  }
}

// Scales are moved as 4-byte words, whatever they mean; any strides in, row-major out.
template <class Team, class Targets>
DEEPEP_DEVICE void send_scales(Team team, const DeepEpDispatchArgs& args, const Destination* to,
                               const Targets& targets, int64_t token) {
  const uint32_t* scales =
      static_cast<const uint32_t*>(args.x_scales) + token * args.scale_token_stride;
  for (int base = 0; base < args.num_scales; base += team.size()) {
    const int i = base + team.lane();
    const bool inside = i < args.num_scales;
    const uint32_t scale = inside ? scales[i * args.scale_group_stride] : 0;
    targets.each_by_all([&](int rank, int64_t row) {
      auto* place = reinterpret_cast<uint32_t*>(to[rank].part[kPartScales]);
      if (inside) place[row * args.num_scales + i] = scale;
    });
  }
}

// Ids of rows that nobody sends: -1, so that a fixed-size output never shows stale experts.
DEEPEP_DEVICE void fill_tail(const DeepEpDispatchArgs& args, int32_t received) {
  const auto grid = arch::this_grid();
  const int64_t begin = static_cast<int64_t>(received) * args.num_topk;
  const int64_t end = static_cast<int64_t>(args.recv_capacity) * args.num_topk;
  for (int64_t i = begin + grid.thread(); i < end; i += grid.num_threads()) {
    store_id(args.recv_topk_idx, args.idx_bytes, i, -1);
  }
}

// A fixed-size output that is too small is a fault of this rank; its peers have left the rest out.
template <class Team>
DEEPEP_DEVICE void check_capacity(Operation& op, Team block, const DeepEpDispatchArgs& args,
                                  int32_t received) {
  if (block.lane() == 0 && received > args.recv_capacity) {
    op.fail(DEEPEP_CAPACITY, DEEPEP_PHASE_NONE, op.rank(),
            static_cast<uint64_t>(args.recv_capacity), static_cast<uint64_t>(received));
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_DISPATCH_H_
