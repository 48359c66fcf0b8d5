// How network memory is laid out: the same on every rank, so that an offset means the same thing at
// both ends of a rail. Read by kernels and, for its size, by kernels/runtime.
//
// First words, each with one writer: counters that messages of a queue carry ahead, and this rank's
// own notes about its queues. Then the counts that notify sends, then for each operation rings of
// messages, a part to send from and a part to receive into, shared evenly by nodes and channels.
#ifndef KERNELS_DEVICE_INTERNODE_MEMORY_H_
#define KERNELS_DEVICE_INTERNODE_MEMORY_H_

#include <cstdint>

#include "kernels/abi/deepep_internode.h"

#ifndef DEEPEP_ANYWHERE  // read by the runtime, which has no architecture
#define DEEPEP_ANYWHERE inline
#endif

namespace deepep {

// The operations that move rows; each has queues of its own, so that two may be in flight.
enum RailKind { kRailDispatch = 0, kRailCombine = 1, kRailKinds = 2 };

constexpr int32_t kWordBytes = 64;  // a word has a cache line of its own
constexpr int64_t kMessageAlignment = 16;
constexpr int64_t kRingAlignment = 256;

DEEPEP_ANYWHERE int64_t aligned(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// What a rank notes about one of its queues, at the sending or the receiving end.
struct QueueNotes {
  uint64_t base;  // messages before the operation
  uint64_t count;  // messages so far
  int64_t next;  // where the role goes on: a token, or an index of forwarded ones
  uint64_t epoch;  // the operation that these notes are of
  uint64_t told;  // messages that the other end knows about
  uint64_t finished;  // 1: nothing is left to do for this operation
  uint64_t reserved[2];
};
static_assert(sizeof(QueueNotes) == kWordBytes, "one note is one cache line");

// Offsets in bytes of what lies in network memory.
struct RailMemory {
  int32_t num_nodes, ranks_per_node;
  int32_t hello, tails, ends, heads, sending, receiving, count_flags;  // words: some megabytes
  int64_t counts_out, counts_in, rings;
  int64_t counts_bytes;  // of the counts for one node

  DEEPEP_ANYWHERE RailMemory(int32_t nodes, int32_t ranks)
      : num_nodes(nodes), ranks_per_node(ranks) {
    const int32_t queues = kRailKinds * nodes * DEEPEP_MAX_CHANNELS * kWordBytes;
    counts_bytes =
        aligned(4 * (kCountHeader + int64_t{ranks} * (1 + DEEPEP_MAX_LOCAL_EXPERTS)), 64);
    hello = 0;  // [kind][node], written by the rail
    tails = hello + kRailKinds * nodes * kWordBytes;  // [kind][node][channel], by the sender
    ends = tails + queues;  // the same
    heads = ends + queues;  // the same, by the receiver
    sending = heads + queues;  // QueueNotes of queues to the nodes
    receiving = sending + queues;  // and of those from them
    count_flags = receiving + queues;  // [parity][node], by the rail
    counts_out = count_flags + 2 * nodes * kWordBytes;  // [parity][node] int32, see notify.h
    counts_in = counts_out + 2 * nodes * counts_bytes;  // the same, by the rail
    rings = aligned(counts_in + 2 * nodes * counts_bytes, kRingAlignment);
  }
  static constexpr int64_t kCountHeader = 4;  // int32 in front of a node's counts

  DEEPEP_ANYWHERE int64_t queue(int kind, int node, int channel) const {
    return ((kind * num_nodes + node) * DEEPEP_MAX_CHANNELS + channel) * kWordBytes;
  }
  DEEPEP_ANYWHERE int64_t count_flag(int parity, int node) const {
    return count_flags + (parity * num_nodes + node) * kWordBytes;
  }
  DEEPEP_ANYWHERE int64_t counts(int64_t base, int parity, int node) const {
    return base + (parity * num_nodes + node) * counts_bytes;
  }
};

// The rings of one operation in a memory of `bytes`: from where on, and how many messages each
// holds.
struct Rings {
  int64_t out, in;  // of [node][channel]
  int64_t ring_bytes;
  int32_t message_bytes, slots, num_channels;

  DEEPEP_ANYWHERE Rings(const RailMemory& at, int64_t bytes, int kind, int channels,
                        int64_t message)
      : message_bytes(static_cast<int32_t>(message)), num_channels(channels) {
    const int64_t parts = 2 * kRailKinds * at.num_nodes * channels;
    ring_bytes = (bytes - at.rings) / parts / kRingAlignment * kRingAlignment;
    slots = ring_bytes > 0 ? static_cast<int32_t>(ring_bytes / message_bytes) : 0;
    const int64_t half = at.num_nodes * channels * ring_bytes;
    out = at.rings + 2 * kind * half;
    in = out + half;
  }
  // Of message number `index` since the operation began.
  DEEPEP_ANYWHERE int64_t slot(int64_t half, int node, int channel, uint64_t index) const {
    const int64_t ring = static_cast<int64_t>(node) * num_channels + channel;
    const auto at = static_cast<int64_t>(index % static_cast<uint32_t>(slots));
    return half + ring * ring_bytes + at * message_bytes;
  }
};

// Bytes of network memory with which every ring of rows of any operation holds `slots` messages.
DEEPEP_ANYWHERE int64_t network_bytes(int64_t nodes, int64_t ranks, int64_t channels,
                                      int64_t message_bytes, int64_t slots) {
  const int64_t ring = aligned(slots * message_bytes, kRingAlignment);
  const RailMemory at(static_cast<int32_t>(nodes), static_cast<int32_t>(ranks));
  return at.rings + 2 * kRailKinds * nodes * channels * ring;
}

DEEPEP_ANYWHERE int32_t message_part(int64_t bytes) {
  return static_cast<int32_t>(aligned(bytes, kMessageAlignment));
}

// A message of dispatch: header, the row's number at each rank of the node, scales, ids, weights,
// row.
struct MessageHeader {
  uint64_t epoch;
  int32_t token;  // index on its source rank
  int32_t number;  // among the tokens for this node
};

struct DispatchMessage {
  int32_t rows, scales, ids, weights, row;  // 32 bits are enough for what stands before the row
  int64_t total;

  DEEPEP_ANYWHERE DispatchMessage(int64_t ranks_per_node, int64_t row_bytes, int64_t num_scales,
                                  int64_t num_topk, int64_t idx_bytes) {
    rows = sizeof(MessageHeader);
    scales = rows + message_part(4 * ranks_per_node);
    ids = scales + message_part(4 * num_scales);
    weights = ids + message_part(num_topk * idx_bytes);
    row = weights + message_part(4 * num_topk);
    total = row + row_bytes;
  }
};

// A message of combine: header, weights, the node's sum of a token's rows.
struct CombineMessage {
  int32_t weights, row;
  int64_t total;

  DEEPEP_ANYWHERE CombineMessage(int64_t row_bytes, int64_t num_topk) {
    weights = sizeof(MessageHeader);
    row = weights + message_part(4 * num_topk);
    total = row + row_bytes;
  }
};

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTERNODE_MEMORY_H_
