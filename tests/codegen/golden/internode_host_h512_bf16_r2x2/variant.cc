// internode_host_h512_bf16_r2x2: variant. Generated, do not edit.
// Template: codegen/templates/base/variant.cu.j2
// Regenerate: python -m codegen render internode_host_h512_bf16_r2x2 variant

#include "kernels/abi/deepep_internode.h"
#include "kernels/abi/deepep_kernel.h"
#include "kernels/abi/deepep_lowlatency.h"
#include "kernels/host/status.h"
#include "kernels/device/arch/host.h"
#include "kernels/device/control.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "internode_host_h512_bf16_r2x2";
inline constexpr int kHidden = 512;  // Elements of a token.
inline constexpr int kElemBytes = 2;
inline constexpr int kNumRanks = 2;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 2;  // Memory domains.

namespace {

constexpr char kTopology[] = "internode";
constexpr char kArch[] = "host";
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
