// Where a domain's kernel-visible words live: on "host" in the process's own memory, on a GPU in
// device memory and in page-locked memory that both sides reach.
#ifndef KERNELS_RUNTIME_PLACE_H_
#define KERNELS_RUNTIME_PLACE_H_

#include <memory>
#include <vector>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/control.h"
#include "kernels/runtime/memory.h"

namespace deepep {

// What kernels tell the host.
struct Mailbox {
  DeepEpFault fault;
  DeepEpCounts counts;
};

class Place {
 public:
  // `device` is an ordinal, or -1 for host memory. `fabric`: what peers reach is exported so.
  static std::unique_ptr<Place> make(int device, int num_ranks, bool fabric);
  virtual ~Place() = default;

  virtual Space space() const = 0;
  virtual int device() const { return -1; }
  // Makes the place usable on the calling thread.
  virtual void enter_thread() const {}

  virtual Mailbox* mailbox() = 0;
  // Tables that kernels read: [num_ranks] control blocks and low-latency workspaces,
  // [num_ranks][DEEPEP_MAX_SEGMENTS] bases.
  virtual void* const* control_table() const = 0;
  virtual void* const* workspace_table() const = 0;
  virtual void* const* segment_table() const = 0;  // the host reads it too
  virtual void** segment_cache() const { return nullptr; }
  virtual void set_control(int rank, void* base) = 0;
  virtual void set_workspace(int rank, void* base) = 0;
  virtual void set_segment(int index, void* base) = 0;

  // The host's view of a control block's own words.
  virtual void read_ops(const Control* control, OpState* ops) const = 0;
  virtual void write_ops(Control* control, const OpState* ops) = 0;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_PLACE_H_
