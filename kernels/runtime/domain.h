// One rank's part in a memory domain: its control block, its view of the peers', its exportable
// memory, its fault record. Everything that outlives an operation and knows no shape.
#ifndef KERNELS_RUNTIME_DOMAIN_H_
#define KERNELS_RUNTIME_DOMAIN_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/control.h"
#include "kernels/runtime/directory.h"
#include "kernels/runtime/memory.h"
#include "kernels/runtime/place.h"
#include "kernels/runtime/pool.h"

namespace deepep {

class Domain {
 public:
  // `device` is a CUDA ordinal, or -1 for the "host" architecture. `fabric`: the domain's memory on
  // a device is exported by fabric handle instead of CUDA IPC.
  Domain(int rank, int num_ranks, int device = -1, bool fabric = false);
  ~Domain();

  // What the peers need to find this rank; exchanged by any means, then given to connect in rank
  // order.
  std::string describe() const;
  void connect(const std::vector<std::string>& descriptions);

  const DeepEpContext* context() const { return &context_; }
  DeepEpCounts* counts() { return &place_->mailbox()->counts; }
  void set_timeout(uint64_t timeout_ns) { context_.timeout_ns = timeout_ns; }
  // See DeepEpContext; also asked by waits of the domain itself.
  void set_interrupt_check(int32_t (*check)()) { context_.is_interrupted = check; }

  // ---- Exported memory: what comes from the pool, and on a GPU also what the caller exports.

  const std::shared_ptr<Pool>& pool() const { return pool_; }
  Space space() const { return place_->space(); }
  // The place of [data, data + bytes) in exported memory, or DEEPEP_NO_LOCATOR.
  DeepEpLocator locate(const void* data, size_t bytes) const;
  // On a GPU: exports the allocation that `data` lies in, if it is not exported yet. The caller
  // keeps the allocation while tensors in it are used; one that took its place is told from it.
  void export_allocation(const void* data);
  // Waits until every peer has opened the segment of `at`. On a timeout the fault record says who
  // has not, and the result is DEEPEP_TIMEOUT.
  int32_t await_opened(DeepEpLocator at, DeepEpOp op);

  // Where the ranks' low-latency workspaces lie, each of `bytes` in memory that its owner exports.
  // Every rank must have opened that memory (await_opened) before any calls this.
  void set_workspaces(const std::vector<DeepEpLocator>& places, uint64_t bytes);

  // ---- Faults

  // Waits until a notify has stored `ticket` or a fault was recorded; returns the fault's code. The
  // limit is for a kernel that never runs: kernels themselves time out earlier.
  int32_t await_counts(uint64_t ticket, uint64_t limit_ns);
  const DeepEpFault& fault() const { return place_->mailbox()->fault; }
  std::string directory_error() const { return directory_ ? directory_->error() : ""; }
  // Operations of each kind that have been completed here.
  std::vector<uint64_t> epochs() const;
  // After a fault, with no operation running on any rank: clears the fault and goes on from epochs
  // that no rank has used.
  void reset(const std::vector<uint64_t>& epochs);

  // Stops the service thread and lets go of the peers. Waits for nobody. Tensors stay valid.
  void close();

 private:
  struct Export {
    size_t bytes;
    uint64_t id;
    int slot;
  };
  // The exported allocation that [data, data + bytes) lies in, as it was when it was exported.
  std::map<cuda::DevicePtr, Export>::const_iterator find(cuda::DevicePtr at, size_t bytes) const;
  Control* own() const { return reinterpret_cast<Control*>(control_[context_.rank]->data()); }
  bool is_interrupted() const {
    return context_.is_interrupted != nullptr && context_.is_interrupted() != 0;
  }
  // Records that what was waited for did not come, and returns the code.
  int32_t record(DeepEpStatus code, DeepEpOp op, DeepEpPhase phase, uint64_t peers,
                 uint64_t expected);

  std::unique_ptr<Place> place_;
  DeepEpContext context_{};
  std::vector<std::shared_ptr<Memory>> control_;  // [rank]
  std::unique_ptr<Directory> directory_;
  std::shared_ptr<Pool> pool_;
  std::map<cuda::DevicePtr, Export> exports_;  // by base
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_DOMAIN_H_
