// Which rank owns which expert. The same rule as deepep/topology.py.
#ifndef KERNELS_DEVICE_EXPERTS_H_
#define KERNELS_DEVICE_EXPERTS_H_

#include <cstdint>

namespace deepep {

// Experts are split contiguously; where they do not divide, the first `num_experts % num_ranks`
// ranks own one more than the others.
struct ExpertSplit {
  int base;   // experts of a rank without an extra one
  int extra;  // ranks with an extra one

  DEEPEP_ANYWHERE ExpertSplit(int num_experts, int num_ranks)
      : base(num_experts / num_ranks), extra(num_experts % num_ranks) {}
  DEEPEP_ANYWHERE int begin(int rank) const { return rank * base + (rank < extra ? rank : extra); }
  DEEPEP_ANYWHERE int count(int rank) const { return base + (rank < extra ? 1 : 0); }
  DEEPEP_ANYWHERE int owner(int expert) const {
    const int wide = extra * (base + 1);  // experts on ranks with an extra one
    return expert < wide ? expert / (base + 1) : extra + (expert - wide) / base;
  }
};

// An id of a top-k tensor, 4 or 8 bytes wide.
DEEPEP_ANYWHERE int64_t load_id(const void* ids, int idx_bytes, int64_t index) {
  return idx_bytes == 4 ? static_cast<const int32_t*>(ids)[index]
                        : static_cast<const int64_t*>(ids)[index];
}
DEEPEP_ANYWHERE void store_id(void* ids, int idx_bytes, int64_t index, int64_t id) {
  if (idx_bytes == 4) {
    static_cast<int32_t*>(ids)[index] = static_cast<int32_t>(id);
  } else {
    static_cast<int64_t*>(ids)[index] = id;
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_EXPERTS_H_
