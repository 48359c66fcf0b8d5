// The network of GPUs: NVSHMEM's device interface, under the names of host_network.h.
#ifndef KERNELS_DEVICE_ARCH_GPU_NETWORK_CUH_
#define KERNELS_DEVICE_ARCH_GPU_NETWORK_CUH_

#include <nvshmem.h>
#include <nvshmemx.h>

#include "kernels/abi/deepep_internode.h"
#include "kernels/device/arch/cuda.cuh"

namespace deepep::arch {

// One rank's end of the network. PEs are numbered as ranks are, and network memory is symmetric, so
// an offset is the same address everywhere.
class Network {
 public:
  DEEPEP_DEVICE explicit Network(const DeepEpNetwork& network) : network_(network) {}

  DEEPEP_DEVICE char* own(int64_t offset) const {
    return static_cast<char*>(network_.memory) + offset;
  }

  // See host_network.h. What the warp's lanes have written to `from` is made visible to whoever
  // reads it for the network: by each lane's own fence, before one of them starts the transfer.
  DEEPEP_DEVICE void put(Team team, int node, int /*queue*/, int64_t to, int64_t from,
                         int64_t bytes) const {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    team.sync();
    nvshmemx_putmem_nbi_warp(own(to), own(from), static_cast<size_t>(bytes), peer(node));
  }
  // The fence of lane 0 stands behind all that the warp's lanes have put: their puts come before it
  // by the barrier. Where the peer is mapped a put is stores of the lanes, and the fence is one of
  // system scope; where it is not, the fence orders the queue pairs. The word itself is one 8-byte
  // store or write, read by load_acquire.
  DEEPEP_DEVICE void put_word(Team team, int node, int /*queue*/, int64_t to,
                              uint64_t value) const {
    team.sync();
    if (team.lane() == 0) {
      nvshmem_fence();
      nvshmem_uint64_p(reinterpret_cast<uint64_t*>(own(to)), value, peer(node));
    }
    team.sync();
  }

 private:
  DEEPEP_DEVICE int peer(int node) const {
    return node * network_.ranks_per_node + network_.local_rank;
  }

  const DeepEpNetwork& network_;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_GPU_NETWORK_CUH_
