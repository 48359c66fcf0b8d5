// The count exchange across nodes. Along the rail each rank tells every other node how many rows it
// has for each of that node's ranks; inside the node these counts go to the ranks concerned, which
// answer with where the rows begin. So a rank learns its own column of the traffic matrix, and
// where the rows that it forwards belong; nobody holds the matrix.
#ifndef KERNELS_DEVICE_INTERNODE_NOTIFY_H_
#define KERNELS_DEVICE_INTERNODE_NOTIFY_H_

#include "kernels/device/experts.h"
#include "kernels/device/internode/rail.h"
#include "kernels/device/intranode/notify.h"

namespace deepep {

// What is the same for all parts of one exchange.
struct Exchange {
  Operation& op;
  const arch::Network& network;
  const DeepEpNetwork& facts;
  const DeepEpInternodeNotifyArgs& args;
  const int node, num_nodes, per_node, parity;
  const RailMemory at;
  const ExpertSplit split;

  DEEPEP_DEVICE Exchange(Operation& op, const arch::Network& network, const DeepEpNetwork& facts,
                         const DeepEpInternodeNotifyArgs& args, int num_nodes, int per_node)
      : op(op),
        network(network),
        facts(facts),
        args(args),
        node(facts.node),
        num_nodes(num_nodes),
        per_node(per_node),
        parity(static_cast<int>(op.epoch() & 1)),
        at(num_nodes, per_node),
        split(args.num_experts, num_nodes * per_node) {}

  DEEPEP_DEVICE int rank_of(int of_node, int local) const { return of_node * per_node + local; }
  DEEPEP_DEVICE int first_expert(int of_node) const { return split.begin(rank_of(of_node, 0)); }
  DEEPEP_DEVICE int num_experts(int of_node) const {
    return first_expert(of_node + 1) - first_expert(of_node);
  }
  // int32: number of experts of the group, tokens for this node, padding; then tokens for each of
  // its ranks; then selections of each of its experts.
  DEEPEP_DEVICE int32_t* counts_from(int of_node) const {
    return reinterpret_cast<int32_t*>(network.own(at.counts(at.counts_in, parity, of_node)));
  }
  DEEPEP_DEVICE int32_t* counts_to(int of_node) const {
    return reinterpret_cast<int32_t*>(network.own(at.counts(at.counts_out, parity, of_node)));
  }
};

// A rank's counts for one node, in the form above. For its own node they stay where they are.
template <class Team>
DEEPEP_DEVICE void collect_counts_for(const Exchange& x, Team block, int of_node, int32_t* out) {
  const int experts = x.num_experts(of_node), header = RailMemory::kCountHeader;
  if (block.lane() == 0) {
    out[0] = x.args.num_experts;
    out[1] = x.args.num_tokens_per_node[of_node];
    out[2] = out[3] = 0;
  }
  for (int i = block.lane(); i < x.per_node; i += block.size()) {
    out[header + i] = x.args.num_tokens_per_rank[x.rank_of(of_node, i)];
  }
  for (int e = block.lane(); e < experts; e += block.size()) {
    out[header + x.per_node + e] = x.args.num_tokens_per_expert[x.first_expert(of_node) + e];
  }
}

// Sends the counts along the rail. Two parities: a peer may begin its next notify while this rank
// reads the last one, and not the one after that.
template <class Team>
DEEPEP_DEVICE void send_counts(const Exchange& x, Team block) {
  for (int other = 0; other < x.num_nodes; ++other) {
    const bool here = other == x.node;
    collect_counts_for(x, block, other, here ? x.counts_from(other) : x.counts_to(other));
  }
  block.sync();
  const auto team = arch::this_team();
  if (block.lane() >= team.size()) return;  // one team sends
  const Rail rail(x.op, x.network, x.facts, kRailDispatch, x.num_nodes, x.per_node, 16);
  for (int other = 0; other < x.num_nodes; ++other) {
    if (other == x.node) continue;
    const int queue = rail.transport_queue(kForth, other, 0);
    const int64_t bytes = aligned(
        4 * (RailMemory::kCountHeader + x.per_node + x.num_experts(other)), kMessageAlignment);
    x.network.put(team, other, queue, x.at.counts(x.at.counts_in, x.parity, x.node),
                  x.at.counts(x.at.counts_out, x.parity, other), bytes);
    x.network.put_word(team, other, queue, x.at.count_flag(x.parity, x.node),
                       x.op.epoch());  // acquired by await_counts_of_rail
  }
}

template <class Team>
DEEPEP_DEVICE bool await_counts_of_rail(const Exchange& x, Team block) {
  x.op.start_phase();
  for (int other = block.lane(); other < x.num_nodes; other += block.size()) {
    if (other == x.node) continue;
    const auto* flag =
        reinterpret_cast<const uint64_t*>(x.network.own(x.at.count_flag(x.parity, other)));
    const uint64_t epoch = x.op.epoch();
    uint64_t seen = 0;
    if (!x.op.arrives(flag, [=](uint64_t value) { return value == epoch; }, &seen)) {
      x.op.fail_rail(x.op.absence(), DEEPEP_PHASE_COUNTS, other, epoch, seen);
    } else if (const int32_t theirs = x.counts_from(other)[0]; theirs != x.args.num_experts) {
      x.op.fail_rail(DEEPEP_MISMATCH, DEEPEP_PHASE_COUNTS, other,
                     pack_signature(0, 0, 0, 0, x.args.num_experts),
                     pack_signature(0, 0, 0, 0, theirs));
    }
  }
  return x.op.ok(block);
}

// Passes on what came along the rail: to each rank of the node the rows that it gets from each
// node's rank of this rail, and the selections of its experts.
template <class Team>
DEEPEP_DEVICE void push_counts_inside(const Exchange& x, Team block) {
  const uint64_t epoch = x.op.epoch();
  const auto cells = [&](int peer) { return x.op.control(peer)->counts[x.parity][x.op.rank()]; };
  for (int i = block.lane(); i < x.per_node * x.num_nodes; i += block.size()) {
    const int peer = i / x.num_nodes, from = i % x.num_nodes;
    const int32_t rows = x.counts_from(from)[RailMemory::kCountHeader + peer];
    arch::store_relaxed(cells(peer) + from, make_cell(epoch, rows));
  }
  for (int e = block.lane(); e < x.num_experts(x.node); e += block.size()) {
    int32_t sum = 0;
    for (int from = 0; from < x.num_nodes; ++from) {
      sum += x.counts_from(from)[RailMemory::kCountHeader + x.per_node + e];
    }
    const int expert = x.first_expert(x.node) + e;
    const int peer = x.split.owner(expert) - x.rank_of(x.node, 0);
    const int local = expert - x.split.begin(x.rank_of(x.node, peer));
    arch::store_relaxed(cells(peer) + DEEPEP_MAX_RANKS + local, make_cell(epoch, sum));
  }
  for (int peer = block.lane(); peer < x.per_node; peer += block.size()) {
    arch::store_relaxed(cells(peer) + kNumExpertsCell, make_cell(epoch, x.args.num_experts));
  }
}

// Sums this rank's column: where the rows of every rank begin here. Tells the rank that forwards
// them.
template <class Team>
DEEPEP_DEVICE bool sum_column(const Exchange& x, Team block) {
  const DeepEpInternodeNotifyArgs& args = x.args;
  const int num_local = x.split.count(x.rank_of(x.node, x.op.rank()));
  const int per_source = x.num_nodes + num_local + 1;
  x.op.start_phase();
  for (int i = block.lane(); i < x.per_node * per_source; i += block.size()) {
    const int source = i / per_source, at = i % per_source;
    const int local = at - x.num_nodes;
    wait_cell(x.op, source,
              local < 0           ? at
              : local < num_local ? DEEPEP_MAX_RANKS + local
                                  : kNumExpertsCell);
  }
  if (!x.op.ok(block)) return false;
  const auto rows_of = [&](int rank) {
    const uint64_t* cells = count_cells(x.op, rank % x.per_node);
    return cell_value(arch::load_relaxed(cells + rank / x.per_node));
  };
  for (int rank = block.lane(); rank < x.num_nodes * x.per_node; rank += block.size()) {
    int32_t first = 0;
    for (int earlier = 0; earlier < rank; ++earlier) first += rows_of(earlier);
    args.recv_prefix[rank] = first + rows_of(rank);
    const int from = rank / x.per_node, forwarder = rank % x.per_node;
    uint64_t* cells = x.op.control(forwarder)->firsts[x.parity][x.op.rank()];
    arch::store_relaxed(cells + from, make_cell(x.op.epoch(), first));
  }
  for (int e = block.lane(); e < num_local; e += block.size()) {
    int32_t sum = 0;
    for (int source = 0; source < x.per_node; ++source) {
      sum += cell_value(arch::load_relaxed(count_cells(x.op, source) + DEEPEP_MAX_RANKS + e));
    }
    args.num_recv_per_expert[e] = sum;
    if (args.counts != nullptr) args.counts->per_expert[e] = sum;
  }
  for (int n = block.lane(); n < x.num_nodes; n += block.size()) {
    int32_t sum = 0;
    for (int from = 0; from <= n; ++from) sum += from == x.node ? 0 : x.counts_from(from)[1];
    args.forward_prefix[n] = sum;
  }
  block.sync();
  return true;
}

// Hears where the rows begin that this rank forwards, and its own ones inside the node.
template <class Team>
DEEPEP_DEVICE bool await_firsts(const Exchange& x, Team block) {
  const uint64_t epoch = x.op.epoch();
  x.op.start_phase();
  for (int i = block.lane(); i < x.num_nodes * x.per_node; i += block.size()) {
    const int from = i / x.per_node, peer = i % x.per_node;
    const uint64_t cell =
        x.op.wait(x.op.own()->firsts[x.parity][peer] + from, peer, DEEPEP_PHASE_COUNTS, epoch,
                  [=](uint64_t value) { return cell_is_of(value, epoch); });
    x.args.forward_first[i] = cell_value(cell);
  }
  return x.op.ok(block);
}

// Gives the totals to the host, as report_counts does inside a node.
template <class Team>
DEEPEP_DEVICE void report_totals(const Exchange& x, Team block) {
  DeepEpCounts* counts = x.args.counts;
  if (counts == nullptr || block.lane() != 0) return;
  counts->num_recv_tokens = x.args.recv_prefix[x.num_nodes * x.per_node - 1];
  counts->num_forward_tokens = x.args.forward_prefix[x.num_nodes - 1];
  counts->num_local_experts = x.split.count(x.rank_of(x.node, x.op.rank()));
  arch::store_release(&counts->ticket, x.args.ticket);  // acquired by Domain::await_counts
}

// Numbers the tokens for one rank: rows in its tensor where it is of this node.
template <class Team>
DEEPEP_DEVICE void number_rows(const Exchange& x, Team block, int rank) {
  const int num_ranks = x.num_nodes * x.per_node, local = rank - x.rank_of(x.node, 0);
  const bool inside = local >= 0 && local < x.per_node;
  int32_t first = 0;
  if (inside) {
    const uint64_t epoch = x.op.epoch();
    const uint64_t cell =
        x.op.wait(x.op.own()->firsts[x.parity][local] + x.node, local, DEEPEP_PHASE_COUNTS, epoch,
                  [=](uint64_t value) { return cell_is_of(value, epoch); });
    first = cell_value(cell);
    if (!x.op.ok(block)) return;
  }
  const int32_t end =
      arch::number_flags(block, x.args.is_token_in_rank + rank, x.args.send_row + rank,
                         x.args.num_tokens, num_ranks, first);
  const int32_t told = x.args.num_tokens_per_rank[rank];
  if (block.lane() == 0 && end - first != told) {
    x.op.fail(DEEPEP_INVALID_ARGUMENT, DEEPEP_PHASE_COUNTS, x.op.rank(),
              static_cast<uint64_t>(told), static_cast<uint64_t>(end - first));
  }
}

// Numbers the tokens for one other node.
template <class Team>
DEEPEP_DEVICE void number_for_node(const Exchange& x, Team block, int of_node) {
  const int num_ranks = x.num_nodes * x.per_node;
  const uint8_t* flags = x.args.is_token_in_rank + x.rank_of(of_node, 0);
  int32_t* out = x.args.node_row + of_node;
  int32_t first = 0;
  if (of_node == x.node) {
    for (int t = block.lane(); t < x.args.num_tokens; t += block.size()) out[t * x.num_nodes] = -1;
    return;
  }
  first =
      arch::number_groups(block, flags, x.per_node, num_ranks, out, x.args.num_tokens, x.num_nodes);
  const int32_t told = x.args.num_tokens_per_node[of_node];
  if (block.lane() == 0 && first != told) {
    x.op.fail(DEEPEP_INVALID_ARGUMENT, DEEPEP_PHASE_COUNTS, x.op.rank(),
              static_cast<uint64_t>(told), static_cast<uint64_t>(first));
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTERNODE_NOTIFY_H_
