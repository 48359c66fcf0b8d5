// What a GPU library across nodes exports to bring its network up; see deepep_internode.h. Included
// once in such a library, by the unit that says what it is.
#ifndef KERNELS_HOST_GPU_NETWORK_ENTRY_H_
#define KERNELS_HOST_GPU_NETWORK_ENTRY_H_

#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstring>

#include "kernels/abi/deepep_internode.h"
#include "kernels/host/status.h"

DEEPEP_API int32_t deepep_network_id_bytes(void) { return sizeof(nvshmemx_uniqueid_t); }

DEEPEP_API int32_t deepep_network_make_id(void* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (const int error = nvshmemx_get_uniqueid(&made)) {
    return deepep::refuse(DEEPEP_DEVICE_ERROR, "nvshmemx_get_uniqueid: error %d", error);
  }
  std::memcpy(id, &made, sizeof(made));
  return DEEPEP_OK;
}

DEEPEP_API int32_t deepep_network_join(const void* id, int32_t rank, int32_t num_ranks) {
  nvshmemx_uniqueid_t world;
  std::memcpy(&world, id, sizeof(world));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  int error = nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &world, &attributes);
  if (error == 0) error = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  if (error != 0) {
    return deepep::refuse(DEEPEP_DEVICE_ERROR,
                          "nvshmemx_init_attr: error %d; NVSHMEM_DEBUG=WARN "
                          "in the environment says more",
                          error);
  }
  if (nvshmem_my_pe() == rank && nvshmem_n_pes() == num_ranks) return DEEPEP_OK;
  return deepep::refuse(DEEPEP_DEVICE_ERROR,
                        "NVSHMEM was brought up before as PE %d of %d in this process, not as %d "
                        "of %d: all Buffers across nodes of a process must be of the same ranks",
                        nvshmem_my_pe(), nvshmem_n_pes(), rank, num_ranks);
}

DEEPEP_API int32_t deepep_network_allocate(uint64_t bytes, void** memory) {
  *memory = nvshmem_malloc(static_cast<size_t>(bytes));
  if (*memory == nullptr) {
    return deepep::refuse(DEEPEP_DEVICE_ERROR,
                          "nvshmem_malloc has no %llu bytes: raise NVSHMEM_SYMMETRIC_SIZE, or make "
                          "the Buffer with a smaller num_rdma_bytes",
                          static_cast<unsigned long long>(bytes));
  }
  cudaError_t error = cudaMemset(*memory, 0, static_cast<size_t>(bytes));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    return deepep::refuse(DEEPEP_DEVICE_ERROR, "clearing network memory: %s",
                          cudaGetErrorString(error));
  }
  nvshmem_barrier_all();  // nobody sends into memory that its owner has yet to clear
  return DEEPEP_OK;
}

#endif  // KERNELS_HOST_GPU_NETWORK_ENTRY_H_
