// One rank's part in a memory domain: its control block, its view of the peers', its exportable
// memory, its fault record. Everything that outlives an operation and knows no shape.
#ifndef KERNELS_RUNTIME_DOMAIN_H_
#define KERNELS_RUNTIME_DOMAIN_H_

#include <memory>
#include <string>
#include <vector>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/control.h"
#include "kernels/runtime/directory.h"
#include "kernels/runtime/memory.h"
#include "kernels/runtime/pool.h"

namespace deepep {

class Domain {
 public:
  Domain(int rank, int num_ranks);
  ~Domain() { close(); }

  // What the peers need to find this rank; exchanged by any means, then given to connect in rank
  // order.
  std::string describe() const;
  void connect(const std::vector<std::string>& descriptions);

  const DeepEpContext* context() const { return &context_; }
  DeepEpCounts* counts() { return &counts_; }
  const std::shared_ptr<Pool>& pool() const { return pool_; }
  void set_timeout(uint64_t timeout_ns) { context_.timeout_ns = timeout_ns; }

  // Waits until every peer has opened the segment of `at`. On a timeout the fault record says who
  // has not, and the result is DEEPEP_TIMEOUT.
  int32_t await_opened(DeepEpLocator at, DeepEpOp op);

  const DeepEpFault& fault() const { return fault_; }
  std::string directory_error() const { return directory_->error(); }

  // Operations of each kind that have been completed here.
  std::vector<uint64_t> epochs() const;
  // After a fault, with no operation running on any rank: clears the fault and goes on from epochs
  // that no rank has used.
  void reset(const std::vector<uint64_t>& epochs);

  // Stops the service thread and lets go of the peers. Waits for nobody. Tensors stay valid.
  void close();

 private:
  struct Description {
    uint32_t abi_version;
    uint32_t control_bytes;
    int32_t rank;
    int32_t num_ranks;
    MemoryHandle control;
    MemoryHandle board;
  };
  Control* own() const { return reinterpret_cast<Control*>(control_[context_.rank]->data()); }

  DeepEpContext context_{};
  DeepEpFault fault_{};
  DeepEpCounts counts_{};
  std::vector<std::shared_ptr<Memory>> control_;  // [rank]
  std::vector<void*> control_data_;               // [rank]
  std::vector<void*> segment_table_;              // [rank][segment]
  std::unique_ptr<Directory> directory_;
  std::shared_ptr<Pool> pool_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_DOMAIN_H_
