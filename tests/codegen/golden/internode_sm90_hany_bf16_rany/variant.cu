// internode_sm90_hany_bf16_rany: variant. Generated, do not edit.
// Template: codegen/templates/base/variant.cu.j2
// Regenerate: python -m codegen render internode_sm90_hany_bf16_rany variant

#include "kernels/abi/deepep_internode.h"
#include "kernels/abi/deepep_kernel.h"
#include "kernels/abi/deepep_lowlatency.h"
#include "kernels/host/gpu_network_entry.h"
#include "kernels/host/status.h"
#include "kernels/device/arch/sm90.cuh"
#include "kernels/device/control.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "internode_sm90_hany_bf16_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 2;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 0;  // Memory domains.

namespace {

constexpr char kTopology[] = "internode";
constexpr char kArch[] = "sm90";
constexpr char kDtype[] = "bf16";

constexpr DeepEpVariantInfo kInfo = {
    sizeof(DeepEpVariantInfo),
    DEEPEP_ABI_VERSION,
    kVariant,
    kTopology,
    kArch,
    kDtype,
    kHidden,
    kNumRanks,
    kNumNodes,
    sizeof(DeepEpContext),
    sizeof(DeepEpLayoutArgs),
    sizeof(DeepEpNotifyArgs),
    sizeof(DeepEpDispatchArgs),
    sizeof(DeepEpCombineArgs),
    sizeof(DeepEpLowLatencyDispatchArgs),
    sizeof(DeepEpLowLatencyCombineArgs),
    sizeof(DeepEpInternodeLayoutArgs),
    sizeof(DeepEpInternodeNotifyArgs),
    sizeof(DeepEpInternodeDispatchArgs),
    sizeof(DeepEpInternodeCombineArgs),
    sizeof(DeepEpNetwork),
    sizeof(Control),
};

}  // namespace
}  // namespace deepep

DEEPEP_API const DeepEpVariantInfo* deepep_variant(void) { return &deepep::kInfo; }

DEEPEP_API const char* deepep_last_error(void) { return deepep::last_error; }
