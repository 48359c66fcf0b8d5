/* C ABI of the low-latency operations, which libraries of topology "lowlatency" export.
 * Rows are expert-major: a rank with El experts receives into [El][num_ranks * max_tokens][hidden],
 * the rows of an expert without gaps, by source rank, then by token.
 */
#ifndef DEEPEP_LOWLATENCY_H_
#define DEEPEP_LOWLATENCY_H_

#include "kernels/abi/deepep_kernel.h"

#define DEEPEP_MAX_LOW_LATENCY_EXPERTS 8192       /* of the whole group */
#define DEEPEP_MAX_LOW_LATENCY_ROWS ((1 << 24) - 2) /* of one expert: num_ranks * max_tokens */
/* Elements that share a scale; the last group of a row may be short. */
#define DEEPEP_FP8_GROUP 128

/* What one call does: all of an operation, or one half, the other following later. */
enum DeepEpLowLatencyPhases { DEEPEP_SEND = 1, DEEPEP_RECEIVE = 2, DEEPEP_SEND_AND_RECEIVE = 3 };

/* What becomes of rows on their way. */
enum DeepEpCast {
  DEEPEP_CAST_NONE = 0,        /* rows have the payload's type already */
  DEEPEP_CAST_FP8 = 1,         /* BF16 to FP8 e4m3, FP32 scales */
  DEEPEP_CAST_FP8_ROUNDED = 2, /* the same with powers of two as scales */
  DEEPEP_CAST_FP8_UE8M0 = 3    /* and their exponents packed, four to a word */
};

typedef struct DeepEpLowLatencyDispatchArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  int32_t phases; /* DeepEpLowLatencyPhases */
  int32_t direct; /* 1: counts first, then rows to their place; needs both phases and no mask.
                     0: rows to the receivers' workspaces, which then collect them */
  int32_t cast;   /* DeepEpCast */
  int32_t num_tokens;
  int32_t max_tokens; /* of any rank, the same on all */
  int32_t hidden;
  int32_t num_scales; /* 4-byte words of scales of a received row; 0: none */
  int32_t num_topk;
  int32_t num_experts;
  int32_t idx_bytes;          /* 4 or 8 */
  const void* x;              /* [num_tokens][hidden] */
  const void* x_scales;       /* strided [num_tokens][num_scales], with DEEPEP_CAST_NONE */
  int64_t scale_token_stride; /* in 4-byte elements */
  int64_t scale_group_stride;
  const void* topk_idx; /* [num_tokens][num_topk]; -1: no selection */
  int32_t*
      mask; /* [num_ranks] or NULL; not 0: the rank is left out. One that times out is entered */
  int32_t*
      send_index;   /* [num_tokens][num_topk] out: number among this rank's rows for the expert */
  int32_t* send_counts;  /* [num_experts] out */
  void* recv_x;          /* [El][num_ranks * max_tokens][hidden] */
  void* recv_scales;     /* [El][num_scales][num_ranks * max_tokens]: the row is the fastest */
  int64_t* recv_source;  /* [El][num_ranks * max_tokens]: token | (token * num_topk + k) << 32 */
  int32_t* recv_count;   /* [El] out */
  int64_t* layout_range; /* [El][num_ranks] out: rows from the rank | first row << 32 */
  int32_t* recv_stats;   /* [El] or NULL: the counts are added */
  int64_t* wait_stats; /* [num_ranks] or NULL: nanoseconds that ranks were waited for are added */
  DeepEpLocator at; /* of recv_x, with `direct`; the scales and the sources lie behind it, each
                       from a multiple of 256 bytes */
} DeepEpLowLatencyDispatchArgs;

typedef struct DeepEpLowLatencyCombineArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  int32_t phases; /* DeepEpLowLatencyPhases */
  int32_t use_logfmt; /* 1: rows travel in 10 bits an element; the same on all ranks, no `at_x` */
  int32_t num_tokens;
  int32_t max_tokens;
  int32_t hidden;
  int32_t num_topk;
  int32_t num_experts;
  int32_t idx_bytes;
  const void* x; /* [El][num_ranks * max_tokens][hidden] BF16 */
  DeepEpLocator at_x; /* where peers read x; DEEPEP_NO_LOCATOR: rows are sent to their workspaces */
  const void* topk_idx; /* [num_tokens][num_topk] */
  const float* topk_weights; /* [num_tokens][num_topk] */
  const int32_t* send_index; /* of the dispatch, as the next two */
  const int64_t* recv_source;
  const int64_t* layout_range;
  int32_t* mask; /* as in the dispatch */
  void* out; /* [num_tokens][hidden] BF16 */
  int64_t* wait_stats; /* [num_ranks] or NULL */
} DeepEpLowLatencyCombineArgs;

DEEPEP_API int32_t deepep_low_latency_dispatch(const DeepEpLowLatencyDispatchArgs* args);
DEEPEP_API int32_t deepep_low_latency_combine(const DeepEpLowLatencyCombineArgs* args);

#endif /* DEEPEP_LOWLATENCY_H_ */
