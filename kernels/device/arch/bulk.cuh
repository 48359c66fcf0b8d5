// The bulk copy engine of SM90 (PTX ISA, "cp.async.bulk") and its barriers, one function each.
#ifndef KERNELS_DEVICE_ARCH_BULK_CUH_
#define KERNELS_DEVICE_ARCH_BULK_CUH_

#include "kernels/device/arch/cuda.cuh"

namespace deepep::arch {

DEEPEP_DEVICE uint32_t shared_address(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

// One arrival a phase: that of expect_bytes.
DEEPEP_DEVICE void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Makes initialised barriers known to the copy engine.
DEEPEP_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEEPEP_DEVICE void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
DEEPEP_DEVICE void wait_barrier(uint64_t* barrier, unsigned phase) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
}

// Orders what this thread has seen by plain loads before its later bulk copies.
DEEPEP_DEVICE void fence_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Addresses and sizes are multiples of 16 bytes.
DEEPEP_DEVICE void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
DEEPEP_DEVICE void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
DEEPEP_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEEPEP_DEVICE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
DEEPEP_DEVICE void wait_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_BULK_CUH_
