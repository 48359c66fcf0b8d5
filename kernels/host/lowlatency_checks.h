// What the low-latency entry functions refuse before anything is sent; checks.h has the rest.
#ifndef KERNELS_HOST_LOWLATENCY_CHECKS_H_
#define KERNELS_HOST_LOWLATENCY_CHECKS_H_

#include "kernels/device/lowlatency/workspace.h"
#include "kernels/host/checks.h"

namespace deepep {

// What both operations have in common.
template <class Args>
int32_t check_low_latency(const Args& args) {
  const int64_t num_ranks = args.context->num_ranks;
  if (int32_t status = check_range("phases", args.phases, DEEPEP_SEND, DEEPEP_SEND_AND_RECEIVE)) {
    return status;
  }
  if (int32_t status =
          check_range("max_tokens", args.max_tokens, 0, DEEPEP_MAX_LOW_LATENCY_ROWS / num_ranks)) {
    return status;
  }
  if (int32_t status = check_range("num_tokens", args.num_tokens, 0, args.max_tokens)) {
    return status;
  }
  if (int32_t status = check_range("num_topk", args.num_topk, 1, DEEPEP_MAX_TOPK)) return status;
  if (int32_t status =
          check_range("num_experts", args.num_experts, 1, DEEPEP_MAX_LOW_LATENCY_EXPERTS)) {
    return status;
  }
  if (int32_t status = check_idx_bytes(args.idx_bytes)) return status;
  if (args.context->workspaces != nullptr) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT, "there is no low-latency workspace");
}

// The part of the workspace that the call needs.
inline int32_t check_workspace(const DeepEpContext& context, int64_t half) {
  const int64_t have = half_bytes(context.num_ranks, static_cast<int64_t>(context.workspace_bytes));
  if (half <= have) return DEEPEP_OK;
  const int64_t need = CellLayout(context.num_ranks).total + 2 * round_up(half, kPartAlignment);
  return refuse(DEEPEP_INVALID_ARGUMENT, "the workspace has %llu bytes, but this call needs %lld",
                static_cast<unsigned long long>(context.workspace_bytes),
                static_cast<long long>(need));
}

inline int32_t check_low_latency_dispatch(const DeepEpLowLatencyDispatchArgs& args,
                                          int64_t elem_bytes) {
  if (int32_t status = check_low_latency(args)) return status;
  const int64_t num_ranks = args.context->num_ranks;
  const int64_t groups = (int64_t{args.hidden} + DEEPEP_FP8_GROUP - 1) / DEEPEP_FP8_GROUP;
  const int64_t last_cast = elem_bytes == 1 ? DEEPEP_CAST_FP8_UE8M0 : DEEPEP_CAST_NONE;
  if (int32_t status = check_range("cast", args.cast, DEEPEP_CAST_NONE, last_cast)) return status;
  if (args.cast != DEEPEP_CAST_NONE) {
    const int64_t scales = args.cast == DEEPEP_CAST_FP8_UE8M0 ? (groups + 3) / 4 : groups;
    if (int32_t status = check_range("num_scales", args.num_scales, scales, scales)) return status;
  }
  if (int32_t status = check_range("num_scales", args.num_scales, 0, (1 << 14) - 1)) return status;
  if (args.direct) {
    if (args.phases == DEEPEP_SEND_AND_RECEIVE && args.mask == nullptr) return DEEPEP_OK;
    return refuse(DEEPEP_INVALID_ARGUMENT, "direct dispatch has both phases and no mask");
  }
  const int64_t experts = (args.num_experts + num_ranks - 1) / num_ranks;
  return check_workspace(*args.context, messages_bytes(experts, num_ranks, args.max_tokens,
                                                       args.hidden * elem_bytes, args.num_scales));
}

inline int32_t check_low_latency_combine(const DeepEpLowLatencyCombineArgs& args) {
  if (int32_t status = check_low_latency(args)) return status;
  if (int32_t status = check_range("use_logfmt", args.use_logfmt, 0, 1)) return status;
  const bool pushes = (args.phases & DEEPEP_SEND) && args.at_x == DEEPEP_NO_LOCATOR;
  if (!pushes) return DEEPEP_OK;
  return check_workspace(*args.context, slots_bytes(args.max_tokens, args.num_topk, args.hidden,
                                                    args.use_logfmt != 0));
}

}  // namespace deepep

#endif  // KERNELS_HOST_LOWLATENCY_CHECKS_H_
