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
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const Entry& entry = op.own()->entries[op.op()][peer];
    for (int part = 0; part < 5; ++part) {
      const DeepEpLocator at = entry.at[part];
      destinations[peer].part[part] = at == DEEPEP_NO_LOCATOR ? nullptr : op.locate(peer, at);
    }
    destinations[peer].capacity = static_cast<int64_t>(entry.capacity);
  }
  block.sync();
}

// The row of `token` in the tensor of `peer`; -1: it does not go there. A receiver whose tensors
// are too small says so itself (check_capacity); nobody writes past them.
DEEPEP_DEVICE int64_t row_at(const DeepEpDispatchArgs& args, const Destination* to, int num_ranks,
                             int64_t token, int peer) {
  const int64_t row = args.send_row[token * num_ranks + peer];
  return row < to[peer].capacity ? row : -1;
}

// Sends one token's row to every rank that needs it. Each rank begins with another peer, so that
// not all write to the same memory at the same time.
template <class Team>
DEEPEP_DEVICE void send_row(const Operation& op, Team team, arch::RowSender& sender,
                            const DeepEpDispatchArgs& args, const Destination* to, int num_ranks,
                            int64_t row_bytes, int64_t token) {
  const char* row_start = static_cast<const char*>(args.x) + token * row_bytes;
  const int64_t chunk = sender.chunk_bytes(row_bytes);
  for (int64_t done = 0; done < row_bytes; done += chunk) {
    const int64_t left = row_bytes - done;
    sender.fetch(team, row_start + done, left < chunk ? left : chunk);
    for (int i = team.lane(); i < num_ranks; i += team.size()) {
      const int turn = i + op.rank();
      const int peer = turn < num_ranks ? turn : turn - num_ranks;
      const int64_t row = row_at(args, to, num_ranks, token, peer);
      if (row >= 0) sender.put(to[peer].part[kPartX] + row * row_bytes + done);
    }
    sender.commit(team);
  }
}

// What travels beside the row: ids as the receiver counts its experts, weights, and the token's
// index.
template <class Team>
DEEPEP_DEVICE void send_routing(Team team, const DeepEpDispatchArgs& args, const Destination* to,
                                int num_ranks, int64_t token) {
  const ExpertSplit split(args.num_experts > 0 ? args.num_experts : num_ranks, num_ranks);
  for (int peer = 0; peer < num_ranks; ++peer) {
    const int64_t row = row_at(args, to, num_ranks, token, peer);
    if (row < 0) continue;
    if (team.lane() == 0 && to[peer].part[kPartSrcIdx] != nullptr) {
      reinterpret_cast<int32_t*>(to[peer].part[kPartSrcIdx])[row] = static_cast<int32_t>(token);
    }
    const int begin = split.begin(peer), count = split.count(peer);
    for (int k = team.lane(); k < args.num_topk; k += team.size()) {
      const int64_t id = load_id(args.topk_idx, args.idx_bytes, token * args.num_topk + k);
      const bool here = id >= begin && id < begin + count;
      const int64_t at = row * args.num_topk + k;
      store_id(to[peer].part[kPartTopkIdx], args.idx_bytes, at, here ? id - begin : -1);
      reinterpret_cast<float*>(to[peer].part[kPartTopkWeights])[at] =
          here ? args.topk_weights[token * args.num_topk + k] : 0.0f;
    }
  }
}

// Scales are moved as 4-byte words, whatever they mean; any strides in, row-major out.
template <class Team>
DEEPEP_DEVICE void send_scales(Team team, const DeepEpDispatchArgs& args, const Destination* to,
                               int num_ranks, int64_t token) {
  const uint32_t* scales =
      static_cast<const uint32_t*>(args.x_scales) + token * args.scale_token_stride;
  for (int i = team.lane(); i < args.num_scales; i += team.size()) {
    const uint32_t scale = scales[i * args.scale_group_stride];
    for (int peer = 0; peer < num_ranks; ++peer) {
      const int64_t row = row_at(args, to, num_ranks, token, peer);
      if (row < 0) continue;
      reinterpret_cast<uint32_t*>(to[peer].part[kPartScales])[row * args.num_scales + i] = scale;
    }
  }
}

// Ids of rows that nobody sends: -1, so that a fixed-size output never shows stale experts.
DEEPEP_DEVICE void fill_tail(const DeepEpDispatchArgs& args, int rank, int num_ranks) {
  const auto grid = arch::this_grid();
  const int64_t begin = static_cast<int64_t>(num_received(args, rank, num_ranks)) * args.num_topk;
  const int64_t end = static_cast<int64_t>(args.recv_capacity) * args.num_topk;
  for (int64_t i = begin + grid.thread(); i < end; i += grid.num_threads()) {
    store_id(args.recv_topk_idx, args.idx_bytes, i, -1);
  }
}

// A fixed-size output that is too small is a fault of this rank; its peers have left the rest out.
template <class Team>
DEEPEP_DEVICE void check_capacity(Operation& op, Team block, const DeepEpDispatchArgs& args,
                                  int num_ranks) {
  const int32_t received = num_received(args, op.rank(), num_ranks);
  if (block.lane() == 0 && received > args.recv_capacity) {
    op.fail(DEEPEP_CAPACITY, DEEPEP_PHASE_NONE, op.rank(),
            static_cast<uint64_t>(args.recv_capacity), static_cast<uint64_t>(received));
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_DISPATCH_H_
