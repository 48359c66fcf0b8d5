// Combine across nodes. A rank sums, for every token that it forwarded, the rows of its own node's
// ranks in FP32, rounds once, and sends the sum back along the rail. The token's own rank adds the
// nodes' sums up in ascending order and rounds once more.
#ifndef KERNELS_DEVICE_INTERNODE_COMBINE_H_
#define KERNELS_DEVICE_INTERNODE_COMBINE_H_

#include "kernels/device/internode/rail.h"
#include "kernels/device/intranode/combine.h"

namespace deepep {

// The rows of one token inside this node, and where their sum goes; as arch::gather_one asks.
struct NodeSum {
  static constexpr bool kWeighted = false;
  const Source* sources;
  const int32_t* rows;  // [ranks of the node], -1 for none
  int64_t row_bytes;
  void* place;

  DEEPEP_DEVICE const void* bias(int64_t, int) const { return nullptr; }
  DEEPEP_DEVICE const void* row(int64_t, int rank) const {
    return rows[rank] < 0 ? nullptr : sources[rank].x + rows[rank] * row_bytes;
  }
  DEEPEP_DEVICE void* out(int64_t) const { return place; }
};

// One combine as its roles see it.
template <int kRanksPerNode, int kNumNodes>
struct Reduction {
  const Rail& rail;
  const DeepEpInternodeCombineArgs& args;
  const Source* sources;
  const int per_node, hidden;
  const CombineMessage message;
  const uint64_t signature;

  DEEPEP_DEVICE int64_t row_bytes() const { return int64_t{hidden} * kCombineElemBytes; }

  // The sum of one token's rows inside this node, and of their weights.
  template <class Team>
  DEEPEP_DEVICE void sum_node(Team team, const int32_t* rows, void* row, float* weights) const {
    const NodeSum plan{sources, rows, row_bytes(), row};
    arch::gather_one<kRanksPerNode>(team, plan, 0, per_node, hidden);
    DEEPEP_ROLLED
    for (int k = team.lane(); k < args.num_topk; k += team.size()) {
      float sum = 0.0f;
      DEEPEP_ROLLED
      for (int rank = 0; rank < per_node; ++rank) {
        if (rows[rank] < 0) continue;
        sum += sources[rank].topk_weights[int64_t{rows[rank]} * args.num_topk + k];
      }
      weights[k] = sum;
    }
  }

  // ---- The sending role: sums for one node's tokens of one channel

  template <class Team>
  DEEPEP_DEVICE Step send(Team team, int node, int channel) const {
    SendEnd<Team> queue(rail, team, node, channel);
    QueueNotes& notes = queue.notes();
    if (notes.finished) return Step::kFinished;
    if (!has_begun(rail, team, node, signature)) return Step::kIdle;
    if (!rail.op.ok(team)) return Step::kFinished;
    const int64_t begin = node > 0 ? args.forward_prefix[node - 1] : 0;
    const int64_t end = args.forward_prefix[node];
    int64_t index = notes.count == notes.base ? begin : notes.next;
    while (index < end && args.forward_token[index] % rail.num_channels != channel) ++index;
    if (index < end) {
      if (!queue.has_room()) return Step::kIdle;
      char* slot = queue.slot();
      if (team.lane() == 0) {
        *reinterpret_cast<MessageHeader*>(slot) = {rail.op.epoch(), args.forward_token[index],
                                                   static_cast<int32_t>(index - begin)};
      }
      sum_node(team, args.forward_row + index * per_node, slot + message.row,
               reinterpret_cast<float*>(slot + message.weights));
      queue.push();
      queue.advance(index + 1);
      return Step::kMoved;
    }
    if (!queue.is_drained()) return Step::kIdle;
    queue.finish();
    return Step::kFinished;
  }

  // ---- The receiving role: the tokens of one channel

  // The sums of one token: messages, this node's too.
  struct TokenSum {
    static constexpr bool kWeighted = false;
    const Reduction& plan;
    int64_t token;
    int channel;

    DEEPEP_DEVICE const void* bias(int64_t, int index) const {
      const void* bias = index == 0 ? plan.args.bias_0 : plan.args.bias_1;
      return bias == nullptr ? nullptr : static_cast<const char*>(bias) + token * plan.row_bytes();
    }
    DEEPEP_DEVICE const void* row(int64_t, int node) const {
      const char* sum = plan.sum_of(token, node, channel);
      return sum == nullptr ? nullptr : sum + plan.message.row;
    }
    DEEPEP_DEVICE void* out(int64_t) const {
      return static_cast<char*>(plan.args.combined_x) + token * plan.row_bytes();
    }
  };

  // This node's sum is put together where a message to itself would be; there is no such queue.
  DEEPEP_DEVICE char* own_sum(int channel) const {
    return rail.network.own(rail.rings.slot(rail.rings.out, rail.node, channel, 0));
  }
  DEEPEP_DEVICE const char* sum_of(int64_t token, int node, int channel) const {
    if (node == rail.node) return is_for_own(token) ? own_sum(channel) : nullptr;
    return is_for(token, node) ? rail.received(node, channel) : nullptr;
  }
  DEEPEP_DEVICE const int32_t* rows_inside(int64_t token) const {
    return args.send_row + (token * rail.num_nodes + rail.node) * per_node;
  }
  DEEPEP_DEVICE bool is_for_own(int64_t token) const {
    const int32_t* rows = rows_inside(token);
    bool is_set = false;
    DEEPEP_ROLLED
    for (int rank = 0; rank < per_node; ++rank) is_set |= rows[rank] >= 0;
    return is_set;
  }
  // Never of this rank's own node.
  DEEPEP_DEVICE bool is_for(int64_t token, int node) const {
    return args.node_row[token * rail.num_nodes + node] >= 0;
  }
  // Where the channel goes on: noted in the place of this rank's own node, which has no queue.
  template <class Team>
  DEEPEP_DEVICE QueueNotes* channel_notes(Team team, int channel) const {
    QueueNotes* notes = rail.notes(rail.at.receiving, rail.node, channel);
    begin_notes(team, notes, rail.op.epoch(), channel);
    return notes;
  }

  template <class Team>
  DEEPEP_DEVICE bool has_sum(Team team, int node, int channel) const {
    if (!has_begun(rail, team, node, signature)) return false;
    return ReceiveEnd<Team>(rail, team, node, channel).has_message();
  }

  template <class Team>
  DEEPEP_DEVICE Step receive(Team team, int channel) const {
    QueueNotes* notes = channel_notes(team, channel);
    if (notes->finished) return Step::kFinished;
    const int64_t token = notes->next;
    if (token >= args.num_tokens) {
      DEEPEP_ROLLED
      for (int node = 0; node < rail.num_nodes; ++node) {
        if (node != rail.node) ReceiveEnd<Team>(rail, team, node, channel).finish();
      }
      team.sync();
      if (team.lane() == 0) notes->finished = 1;
      team.sync();
      return Step::kFinished;
    }
    DEEPEP_ROLLED
    for (int node = 0; node < rail.num_nodes; ++node) {
      if (is_for(token, node) && !has_sum(team, node, channel)) return Step::kIdle;
    }
    if (!rail.op.ok(team)) return Step::kFinished;
    add_up(team, token, channel);
    DEEPEP_ROLLED
    for (int node = 0; node < rail.num_nodes; ++node) {
      if (is_for(token, node)) ReceiveEnd<Team>(rail, team, node, channel).pop();
    }
    if (team.lane() == 0) notes->next = token + rail.num_channels;
    team.sync();
    return Step::kMoved;
  }

  template <class Team>
  DEEPEP_DEVICE void add_up(Team team, int64_t token, int channel) const {
    char* own = own_sum(channel);
    sum_node(team, rows_inside(token), own + message.row,
             reinterpret_cast<float*>(own + message.weights));
    team.sync();
    const TokenSum plan{*this, token, channel};
    arch::gather_one<kNumNodes>(team, plan, 0, rail.num_nodes, hidden);
    DEEPEP_ROLLED
    for (int k = team.lane(); k < args.num_topk; k += team.size()) {
      float sum = 0.0f;
      DEEPEP_ROLLED
      for (int node = 0; node < rail.num_nodes; ++node) {
        const char* from = sum_of(token, node, channel);
        if (from != nullptr) sum += reinterpret_cast<const float*>(from + message.weights)[k];
      }
      args.combined_topk_weights[token * args.num_topk + k] = sum;
    }
    team.sync();
  }

  // Names the nodes that a role waits for.
  template <class Team>
  DEEPEP_DEVICE void blame(Team team, int role) const {
    const int num_queues = rail.num_queues(), channel = role - num_queues;
    DEEPEP_ROLLED
    for (int node = 0; node < rail.num_nodes; ++node) {
      const bool waits =
          role < num_queues ? node == rail.node_of(role)
                            : is_for(rail.notes(rail.at.receiving, rail.node, channel)->next, node);
      if (!waits || (role >= num_queues && has_sum(team, node, channel))) continue;
      rail.op.fail_rail(rail.op.absence(), DEEPEP_PHASE_ROWS, node, rail.op.epoch(), 0);
    }
  }
};

// Everything that one team does of a combine. Roles: the sending ends, then one for each channel.
template <int kRanksPerNode, int kNumNodes, class Team>
DEEPEP_DEVICE bool run_combine(const Reduction<kRanksPerNode, kNumNodes>& plan, Team team) {
  const Rail& rail = plan.rail;
  const auto grid = arch::this_grid();
  const int num_queues = rail.num_queues();
  const int num_roles = num_queues + rail.num_channels;
  const RoleTeams at_work(grid.num_teams(), num_roles);
  if (!at_work.has(grid.team())) return true;
  return run_roles(
      rail.op, team, at_work.number(grid.team()), num_roles, at_work.count,
      [&](int role) {
        return role < num_queues ? plan.send(team, rail.node_of(role), rail.channel_of(role))
                                 : plan.receive(team, role - num_queues);
      },
      [&](int role) { plan.blame(team, role); });
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTERNODE_COMBINE_H_
