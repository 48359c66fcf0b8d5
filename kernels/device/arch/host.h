// Primitives of the "host" architecture. Used by kernels/device/** under the names that sm80.cuh
// and sm90.cuh give to their own versions. Knows nothing of the protocols.
#ifndef KERNELS_DEVICE_ARCH_HOST_H_
#define KERNELS_DEVICE_ARCH_HOST_H_

#include <cstdint>
#include <cstring>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host_base.h"
#include "kernels/device/arch/host_choices.h"
#include "kernels/device/arch/host_rows.h"

namespace deepep::arch {

// ---- Launch

struct LaunchShape {};
// Threads of a block, at most; of kernels that count, exchange, send rows and gather rows.
constexpr int kCountThreads = 1, kExchangeThreads = 1, kSendThreads = 1, kGatherThreads = 1;
constexpr int kRailExchangeThreads = 1, kRailSendThreads = 1, kRailGatherThreads = 1;  // and nodes
inline LaunchShape count_shape(int /*num_tokens*/, int /*max_blocks*/) { return {}; }
inline LaunchShape exchange_shape(int /*num_ranks*/, int /*max_blocks*/, int /*threads*/ = 1) {
  return {};
}
inline LaunchShape send_shape(int /*num_blocks*/, int64_t /*row_bytes*/) { return {}; }
inline LaunchShape gather_shape(int /*num_blocks*/, int /*num_ranks*/, int64_t /*row_bytes*/) {
  return {};
}
inline LaunchShape rail_send_shape(int /*num_blocks*/, int64_t /*row_bytes*/) { return {}; }
inline LaunchShape rail_gather_shape(int /*num_blocks*/) { return {}; }
// Of the low-latency kernels that spread rows, move them and sum them.
constexpr int kMoveThreads = 1, kChoiceThreads = 1;
constexpr int dispatch_threads(bool /*staged*/) { return 1; }
inline LaunchShape dispatch_shape(int /*num_blocks*/, int64_t /*row_bytes*/, int /*num_experts*/,
                                  bool /*staged*/) {
  return {};
}
inline LaunchShape move_shape(int /*num_blocks*/, int64_t /*row_bytes*/) { return {}; }
inline LaunchShape choice_shape(int /*num_blocks*/, int64_t /*row_bytes*/, bool /*moves*/) {
  return {};
}

// Runs the kernel to its end, in the caller's thread. Returns a DeepEpStatus.
template <auto kKernel, class... Args>
int32_t launch(void* /*stream*/, LaunchShape, const Args&... args) {
  kKernel(args...);
  return DEEPEP_OK;
}

// What the operation that has just been launched came to, as far as the host can know by now.
inline int32_t outcome(const DeepEpContext& context) {
  return static_cast<int32_t>(__atomic_load_n(&context.fault->code, __ATOMIC_ACQUIRE));
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_HOST_H_
