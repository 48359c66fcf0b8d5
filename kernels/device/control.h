// The control block: the words by which the ranks of one memory domain find each other.
// Used by every protocol in kernels/device and by kernels/runtime, which allocates one per rank.
// Knows no shape: its layout depends on the limits of the ABI alone, so that calls with other
// hidden sizes, token counts or experts need no clean-up in between.
#ifndef KERNELS_DEVICE_CONTROL_H_
#define KERNELS_DEVICE_CONTROL_H_

#include <cstdint>

#include "kernels/abi/deepep_internode.h"
#include "kernels/abi/deepep_kernel.h"

namespace deepep {

// Everything in a control block is monotonic: a word is never reset, a new operation waits for a
// new epoch. All-zero memory is a valid start, and the first epoch is 1.

// Own words of one kind of operation; only kernels of this rank touch them.
struct alignas(64) OpState {
  uint64_t epoch;     // operations of this kind that have been completed here
  uint32_t staged;    // blocks of the running kernel that have copied what peers will read
  uint32_t arrivals;  // blocks of the running kernel that have finished
  uint32_t failed;  // 1: a wait was given up; later kernels return at once until the host resets
  int32_t disagrees;  // the low-latency operation that peers do not agree about
  // Of the low-latency operations, see kernels/device/lowlatency/sequence.h.
  uint64_t outstanding[2];  // [half]: operation that peers may not have finished with; 0: none
  uint64_t pending[2];      // [kind]: operation that has been sent and not received
  uint64_t collected;  // operation whose counts the first block has collected
};

// What a peer says when it is ready for an operation, written into the block of the rank that
// reads.
struct alignas(64) Entry {
  uint64_t epoch;  // stored last (release); pairs with wait_entries (acquire)
  uint64_t signature;  // the arguments that must agree on all ranks, see pack_signature
  uint64_t capacity;  // rows that its receive tensors hold
  DeepEpLocator at[5];
};
static_assert(sizeof(Entry) == 64, "one entry is one cache line");

struct Control {
  OpState ops[DEEPEP_NUM_OPS];
  Entry entries[DEEPEP_NUM_OPS][DEEPEP_MAX_RANKS];  // [op][peer]
  uint64_t done[DEEPEP_NUM_OPS][DEEPEP_MAX_RANKS];  // [op][peer]: epoch that the peer has closed
  // [epoch parity][source]: {epoch:32, value:32} cells, first the source's token count for every
  // rank, then its selections of this rank's experts, last its number of experts. A cell is its own
  // flag. Two parities, since a source may begin its next notify while this rank still reads the
  // last one.
  uint64_t counts[2][DEEPEP_MAX_RANKS][DEEPEP_MAX_RANKS + DEEPEP_MAX_LOCAL_EXPERTS + 1];
  // [epoch parity][peer][node], cells as above: where the rows that this rank forwards for a node
  // begin at the peer. Across nodes `counts` has node numbers in place of ranks.
  uint64_t firsts[2][DEEPEP_MAX_RANKS][DEEPEP_MAX_NODES];
};
static_assert(DEEPEP_MAX_NODES <= DEEPEP_MAX_RANKS, "counts of nodes fit the cells of ranks");

}  // namespace deepep

#endif  // KERNELS_DEVICE_CONTROL_H_
