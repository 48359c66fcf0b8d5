// What the entry functions refuse before anything is sent: mixed builds, shapes that this library
// was not built for, impossible or contradicting counts. Python checks more, in the user's words;
// another caller of the C ABI keeps to docs/abi.md.
#ifndef KERNELS_HOST_CHECKS_H_
#define KERNELS_HOST_CHECKS_H_

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/experts.h"
#include "kernels/host/status.h"

namespace deepep {

// Comes first in every entry function.
template <class Args>
int32_t check_struct(const Args* args) {
  last_error[0] = '\0';
  if (args != nullptr && args->struct_size == sizeof(Args)) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT,
                "argument struct has %u bytes, this library was built for %zu: rebuild both sides",
                args == nullptr ? 0u : args->struct_size, sizeof(Args));
}

inline int32_t check_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT, "%s is %lld, but must be %lld to %lld", what,
                static_cast<long long>(value), static_cast<long long>(low),
                static_cast<long long>(high));
}

// Rows of a tensor: none are legal, a negative number is an overflow of the caller's.
inline int32_t check_count(const char* what, int32_t value) {
  return check_range(what, value, 0, INT32_MAX);
}

inline int32_t check_idx_bytes(int64_t idx_bytes) {
  if (idx_bytes == 4 || idx_bytes == 8) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT, "idx_bytes is %lld, but ids have 4 or 8 bytes",
                static_cast<long long>(idx_bytes));
}

// The width of a top-k tensor and of its ids, which a call without one (0) leaves open.
inline int32_t check_topk(int64_t num_topk, int64_t idx_bytes) {
  if (int32_t status = check_range("num_topk", num_topk, 0, DEEPEP_MAX_TOPK)) return status;
  return num_topk == 0 ? DEEPEP_OK : check_idx_bytes(idx_bytes);
}

// A number that the variant fixes; `fixed` is 0 where it does not.
inline int32_t check_fixed(const char* what, int64_t value, int64_t fixed) {
  if (fixed == 0 || value == fixed) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT, "%s is %lld, but this library was built for %lld", what,
                static_cast<long long>(value), static_cast<long long>(fixed));
}

inline int32_t check_row(int64_t hidden, int64_t fixed_hidden, int64_t elem_bytes) {
  if (int32_t status = check_fixed("hidden", hidden, fixed_hidden)) return status;
  if (hidden > 0 && hidden * elem_bytes % 16 == 0) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT,
                "a row has %lld bytes, but must have a positive multiple of 16",
                static_cast<long long>(hidden * elem_bytes));
}

inline int32_t check_ranks(int64_t num_ranks) {
  return check_range("num_ranks", num_ranks, 1, DEEPEP_MAX_RANKS);
}

inline int32_t check_context(const DeepEpContext* context, int64_t fixed_ranks) {
  if (int32_t status = check_struct(context)) return status;
  if (int32_t status = check_fixed("num_ranks", context->num_ranks, fixed_ranks)) return status;
  if (int32_t status = check_ranks(context->num_ranks)) return status;
  return check_range("rank", context->rank, 0, context->num_ranks - 1);
}

// Every rank's experts fit the control block.
inline int32_t check_experts(int64_t num_experts, int64_t num_ranks) {
  return check_range("num_experts", num_experts, 1, num_ranks * DEEPEP_MAX_LOCAL_EXPERTS);
}

// Blocks on a device meet in it.
template <bool kReadsArguments>
int32_t check_scratch(const int32_t* scratch, int64_t words) {
  if (kReadsArguments || scratch != nullptr) return DEEPEP_OK;
  return refuse(DEEPEP_INVALID_ARGUMENT,
                "scratch is NULL, but must be %lld zeros that only layouts of this stream use",
                static_cast<long long>(words));
}

// Ids that are neither experts nor -1. Reads the tensor, so only where the host can.
template <bool kReadsArguments, class LayoutArgs>
int32_t check_ids(const LayoutArgs& args) {
  if (!kReadsArguments) return DEEPEP_OK;
  const int64_t count = int64_t{args.num_tokens} * args.num_topk;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = load_id(args.topk_idx, args.idx_bytes, i);
    if (id >= -1 && id < args.num_experts) continue;
    return refuse(DEEPEP_INVALID_ARGUMENT,
                  "topk_idx[%lld][%lld] is %lld, but must be an expert, 0 to %d, or -1 for none",
                  static_cast<long long>(i / args.num_topk),
                  static_cast<long long>(i % args.num_topk), static_cast<long long>(id),
                  args.num_experts - 1);
  }
  return DEEPEP_OK;
}

// The counts that peers will be told must be those of the flags that the rows are placed by: other
// ranks' rows lie right behind. Reads the tensors, so only where the host can.
template <bool kReadsArguments>
int32_t check_counts(const DeepEpNotifyArgs& args) {
  if (!kReadsArguments) return DEEPEP_OK;
  const int num_ranks = args.context->num_ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int64_t flagged = 0;
    for (int64_t token = 0; token < args.num_tokens; ++token) {
      flagged += args.is_token_in_rank[token * num_ranks + rank] != 0;
    }
    if (flagged != args.num_tokens_per_rank[rank]) {
      return refuse(
          DEEPEP_INVALID_ARGUMENT,
          "num_tokens_per_rank[%d] is %d, but is_token_in_rank marks %lld tokens for that "
          "rank: take both from one get_dispatch_layout",
          rank, args.num_tokens_per_rank[rank], static_cast<long long>(flagged));
    }
  }
  return DEEPEP_OK;
}

}  // namespace deepep

#endif  // KERNELS_HOST_CHECKS_H_
