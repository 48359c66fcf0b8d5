// Dispatch across nodes. Rows for ranks of this node go straight to their place, as inside one
// memory domain. A row for another node crosses once, to the rank of this rail there, which puts it
// straight to its place at each rank that needs it.
#ifndef KERNELS_DEVICE_INTERNODE_DISPATCH_H_
#define KERNELS_DEVICE_INTERNODE_DISPATCH_H_

#include "kernels/device/internode/rail.h"
#include "kernels/device/intranode/dispatch.h"

namespace deepep {

// The arguments as the parts that are common with dispatch inside a node take them. `x` and what
// lies beside it are those of this rank's tokens, or of one message.
DEEPEP_DEVICE DeepEpDispatchArgs inside_node(const DeepEpInternodeDispatchArgs& args) {
  DeepEpDispatchArgs inner{};
  inner.num_tokens = args.num_tokens;
  inner.num_scales = args.num_scales;
  inner.num_topk = args.num_topk;
  inner.num_experts = args.num_experts;
  inner.idx_bytes = args.idx_bytes;
  inner.x = args.x;
  inner.x_scales = args.x_scales;
  inner.scale_token_stride = args.scale_token_stride;
  inner.scale_group_stride = args.scale_group_stride;
  inner.topk_idx = args.topk_idx;
  inner.topk_weights = args.topk_weights;
  inner.recv_capacity = args.recv_capacity;
  inner.recv_topk_idx = args.recv_topk_idx;
  return inner;
}

// One dispatch as its roles see it.
template <int kRanksPerNode>
struct Forwarding {
  const Rail& rail;
  const DeepEpInternodeDispatchArgs& args;
  const Destination* to;
  arch::RowSender& sender;
  const int per_node;
  const int64_t row_bytes;
  const DispatchMessage message;
  const uint64_t signature;
  const bool routed;

  DEEPEP_DEVICE ExpertSplit split() const { return {args.num_experts, rail.num_nodes * per_node}; }
  DEEPEP_DEVICE int first_rank() const { return rail.node * per_node; }

  // Puts one token's row, and what belongs to it, to its place at ranks of this node.
  template <class Team>
  DEEPEP_DEVICE void place(Team team, const DeepEpDispatchArgs& from, const int32_t* rows,
                           int64_t token, int32_t index) const {
    const arch::Targets<kRanksPerNode> targets(team, rows, per_node, rail.op.rank(),
                                               [this](int rank) { return to[rank].capacity; });
    send_row(team, sender, from, to, targets, row_bytes, token);
    if (from.num_scales > 0) send_scales(team, from, to, targets, token);
    if (routed) send_routing(team, from, to, targets, split(), first_rank(), token, index);
  }

  // ---- The sending role: this rank's tokens of one channel for one node

  template <class Team>
  DEEPEP_DEVICE Step send(Team team, int node, int channel) const {
    SendEnd<Team> queue(rail, team, node, channel);
    QueueNotes& notes = queue.notes();
    if (notes.finished) return Step::kFinished;
    if (notes.next >= 0) {
      const int64_t token = arch::next_set(team, args.node_row + node, rail.num_nodes, notes.next,
                                           args.num_tokens, rail.num_channels);
      if (token < args.num_tokens) {
        if (!queue.has_room()) return Step::kIdle;
        write(team, queue.slot(), node, token);
        queue.push();
        queue.advance(token + rail.num_channels);
        return Step::kMoved;
      }
      queue.end();
      queue.advance(-1);
      return Step::kMoved;
    }
    // The slots are free again before another operation divides the memory in its own way.
    if (!queue.is_drained()) return Step::kIdle;
    queue.finish();
    return Step::kFinished;
  }

  // Puts a message together.
  template <class Team>
  DEEPEP_DEVICE void write(Team team, char* slot, int node, int64_t token) const {
    const int num_ranks = rail.num_nodes * per_node;
    if (team.lane() == 0) {
      *reinterpret_cast<MessageHeader*>(slot) = {rail.op.epoch(), static_cast<int32_t>(token),
                                                 args.node_row[token * rail.num_nodes + node]};
    }
    auto* rows = reinterpret_cast<int32_t*>(slot + message.rows);
    const int32_t* numbers = args.send_row + token * num_ranks + node * per_node;
    for (int i = team.lane(); i < per_node; i += team.size()) rows[i] = numbers[i];
    auto* scales = reinterpret_cast<uint32_t*>(slot + message.scales);
    const auto* from =
        static_cast<const uint32_t*>(args.x_scales) + token * args.scale_token_stride;
    for (int i = team.lane(); i < args.num_scales; i += team.size()) {
      scales[i] = from[i * args.scale_group_stride];
    }
    auto* weights = reinterpret_cast<float*>(slot + message.weights);
    for (int k = team.lane(); k < args.num_topk; k += team.size()) {
      const int64_t at = token * args.num_topk + k;
      store_id(slot + message.ids, args.idx_bytes, k, load_id(args.topk_idx, args.idx_bytes, at));
      weights[k] = args.topk_weights[at];
    }
    arch::copy_row(team, static_cast<const char*>(args.x) + token * row_bytes, slot + message.row,
                   row_bytes);
  }

  // ---- The forwarding role: what comes from one node by one channel

  template <class Team>
  DEEPEP_DEVICE Step forward(Team team, int node, int channel) const {
    ReceiveEnd<Team> queue(rail, team, node, channel);
    if (queue.notes().finished) return Step::kFinished;
    if (!has_begun(rail, team, node, signature)) return Step::kIdle;
    if (!rail.op.ok(team)) return Step::kFinished;
    if (queue.has_message()) {
      read(team, queue.message(), node);
      queue.pop();
      return Step::kMoved;
    }
    if (!queue.is_at_end()) return Step::kIdle;
    queue.finish();
    return Step::kFinished;
  }

  template <class Team>
  DEEPEP_DEVICE void read(Team team, char* slot, int node) const {
    const auto& header = *reinterpret_cast<const MessageHeader*>(slot);
    auto* rows = reinterpret_cast<int32_t*>(slot + message.rows);
    const int32_t* first = args.forward_first + node * per_node;
    const int64_t index = (node > 0 ? args.forward_prefix[node - 1] : 0) + header.number;
    const bool fits = index < args.forward_capacity;
    const bool wanted = args.forward_row != nullptr;
    if (wanted && !fits && team.lane() == 0) {
      rail.op.fail(DEEPEP_CAPACITY, DEEPEP_PHASE_RAIL, rail.op.rank(),
                   static_cast<uint64_t>(args.forward_capacity), static_cast<uint64_t>(index) + 1);
    }
    // The numbers become rows where they are: until it is popped, the message is this rank's own.
    for (int i = team.lane(); i < per_node; i += team.size()) {
      if (rows[i] >= 0) rows[i] += first[i];
      if (wanted && fits) args.forward_row[index * per_node + i] = rows[i];
    }
    if (wanted && fits && team.lane() == 0) args.forward_token[index] = header.token;
    team.sync();
    DeepEpDispatchArgs from = inside_node(args);
    from.x = slot + message.row;
    from.x_scales = slot + message.scales;
    from.scale_token_stride = 0;
    from.scale_group_stride = 1;
    from.topk_idx = slot + message.ids;
    from.topk_weights = reinterpret_cast<const float*>(slot + message.weights);
    sender.see_arrivals();
    place(team, from, rows, 0, header.token);  // the row has been read when this returns
  }
};

// Everything that one team does of a dispatch.
template <int kRanksPerNode, class Team>
DEEPEP_DEVICE bool run_dispatch(const Forwarding<kRanksPerNode>& plan, Team team) {
  const Rail& rail = plan.rail;
  const auto grid = arch::this_grid();
  const int num_ranks = rail.num_nodes * plan.per_node, num_queues = rail.num_queues();
  // Up to half of the teams look after queues; a lone one does both, rows for its own node first.
  const int num_teams = grid.num_teams(), half = num_teams > 1 ? num_teams / 2 : 1;
  const RoleTeams on_rail(num_teams, half < 2 * num_queues ? half : 2 * num_queues);
  const bool is_lone = num_teams == 1;
  if (is_lone || !on_rail.has(grid.team())) {
    const DeepEpDispatchArgs from = inside_node(plan.args);
    const int first = is_lone ? 0 : on_rail.others_before(grid.team());
    const int stride = is_lone ? 1 : num_teams - on_rail.count;
    for (int64_t token = first; token < plan.args.num_tokens; token += stride) {
      const int32_t* rows = plan.args.send_row + token * num_ranks + plan.first_rank();
      plan.place(team, from, rows, token, static_cast<int32_t>(token));
    }
  }
  if (!on_rail.has(grid.team())) return true;
  return run_roles(
      rail.op, team, on_rail.number(grid.team()), 2 * num_queues, on_rail.count,
      [&](int role) {
        const int queue = role / 2, node = rail.node_of(queue), channel = rail.channel_of(queue);
        return role % 2 == 0 ? plan.send(team, node, channel) : plan.forward(team, node, channel);
      },
      [&](int role) {
        const int node = rail.node_of(role / 2);
        const bool reads = role % 2 == 1 && !has_begun(rail, team, node, plan.signature);
        rail.op.fail_rail(rail.op.absence(), reads ? DEEPEP_PHASE_RAIL : DEEPEP_PHASE_ROWS, node,
                          rail.op.epoch(), 0);
      });
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTERNODE_DISPATCH_H_
