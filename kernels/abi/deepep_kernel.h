/* C ABI of every kernel library: the structs, the status codes and the functions each one exports.
 * Used by the generated sources (who implement it) and by kernels/runtime (who calls it).
 * Knows no C++ type, no torch, no CUDA header: streams are void*, dtypes are facts of the variant.
 */
#ifndef DEEPEP_KERNEL_H_
#define DEEPEP_KERNEL_H_

#include <stdint.h>

#ifdef __cplusplus
#define DEEPEP_API extern "C" __attribute__((visibility("default")))
#else
#define DEEPEP_API extern __attribute__((visibility("default")))
#endif

/* Raised when a struct, a function or a meaning below changes. */
#define DEEPEP_ABI_VERSION 3

/* Limits, stated once. The control block (kernels/device/control.h) is sized by them. */
#define DEEPEP_MAX_RANKS 64           /* ranks that share one memory domain */
#define DEEPEP_MAX_TOPK 32            /* experts a token may choose */
#define DEEPEP_MAX_LOCAL_EXPERTS 1024 /* experts on one rank */
#define DEEPEP_MAX_SEGMENTS 1024      /* memory segments a rank may export */

/* Status codes: what every function below returns, and the code of a fault record. */
enum DeepEpStatus {
  DEEPEP_OK = 0,
  DEEPEP_INVALID_ARGUMENT = 1, /* refused before anything was sent */
  DEEPEP_TIMEOUT = 2,          /* a peer did not arrive in time */
  DEEPEP_MISMATCH = 3,         /* a peer called the same operation with other arguments */
  DEEPEP_CAPACITY = 4,         /* more rows arrive than the receive tensor holds */
  DEEPEP_DEVICE_ERROR = 5,     /* the device runtime reported an error; see deepep_last_error */
  DEEPEP_INTERRUPTED = 6       /* a wait ended because the caller wanted it to */
};

/* Operations; each has an epoch counter of its own in the control block. */
enum DeepEpOp {
  DEEPEP_OP_NOTIFY = 0,
  DEEPEP_OP_DISPATCH = 1,
  DEEPEP_OP_COMBINE = 2,
  DEEPEP_OP_LOW_LATENCY_DISPATCH = 3,
  DEEPEP_OP_LOW_LATENCY_COMBINE = 4,
  DEEPEP_NUM_OPS = 5
};

/* What an operation waits for when it times out. */
enum DeepEpPhase {
  DEEPEP_PHASE_NONE = 0,
  DEEPEP_PHASE_COUNTS = 1,  /* the peers' token counts */
  DEEPEP_PHASE_ADDRESS = 2, /* the peers' receive or source addresses */
  DEEPEP_PHASE_DONE = 3,    /* the peers' closing flags */
  DEEPEP_PHASE_SEGMENT = 4, /* the peers' opening of memory that this rank exports */
  DEEPEP_PHASE_ROWS = 5,    /* the peers' rows */
  DEEPEP_PHASE_REUSE = 6,   /* the peers' reading of what is to be overwritten */
  DEEPEP_PHASE_RAIL = 7     /* a rank of the same rail to begin the operation */
};

/* A place in exported memory: segment number in the upper 16 bits, byte offset in the lower 48. */
typedef uint64_t DeepEpLocator;
#define DEEPEP_NO_LOCATOR UINT64_MAX

/* Facts of a library, compared with the manifest before anything else is called. */
typedef struct DeepEpVariantInfo {
  uint32_t struct_size;
  uint32_t abi_version;
  const char* name;     /* "intranode_host_h7168_bf16_r8" */
  const char* topology; /* "intranode" */
  const char* arch;     /* "host", "sm80", "sm90" */
  const char* dtype;    /* dispatch payload: "bf16", "fp8" */
  int32_t hidden;       /* elements of a row; 0: given at run time */
  int32_t num_ranks;    /* of one memory domain; 0: given at run time */
  int32_t num_nodes;    /* memory domains; 0: given at run time */
  uint32_t context_size;
  uint32_t layout_args_size;
  uint32_t notify_args_size;
  uint32_t dispatch_args_size;
  uint32_t combine_args_size;
  uint32_t low_latency_dispatch_args_size;
  uint32_t low_latency_combine_args_size;
  uint32_t internode_layout_args_size;
  uint32_t internode_notify_args_size;
  uint32_t internode_dispatch_args_size;
  uint32_t internode_combine_args_size;
  uint32_t network_size;
  uint32_t control_bytes; /* sizeof(Control): both sides must agree on its layout */
} DeepEpVariantInfo;

/* Written by the kernel that gives up a wait or finds a fault; read by the host. The first fault
 * wins: it claims the record, fills it in and stores `code` last, with release order. */
typedef struct DeepEpFault {
  uint64_t code;    /* DeepEpStatus */
  uint32_t claimed; /* the code of the fault that the record is for */
  uint32_t op;      /* DeepEpOp */
  uint32_t phase;
  uint32_t rank;  /* the rank that reports */
  uint64_t epoch; /* how many operations of this kind this rank has begun */
  uint64_t peers; /* bit r: rank r of this memory domain is missing or differs */
  uint64_t nodes; /* bit n: so is the rank of this one's rail on node n */
  uint64_t expected;
  uint64_t seen;
} DeepEpFault;

/* What the host learns of a notify: `ticket` is stored last, with release order. */
typedef struct DeepEpCounts {
  uint64_t ticket;
  int32_t num_recv_tokens;
  int32_t num_forward_tokens; /* of other nodes, that this rank puts in place; 0 inside a node */
  int32_t num_local_experts;
  int32_t reserved;
  int32_t per_expert[DEEPEP_MAX_LOCAL_EXPERTS]; /* received selections, not aligned */
} DeepEpCounts;

/* What all operations of one Buffer share. Pointers are valid where the kernel runs. */
typedef struct DeepEpContext {
  uint32_t struct_size;
  int32_t rank;
  int32_t num_ranks;
  int32_t reserved;
  void* const* control;  /* [num_ranks] every rank's control block, as mapped here; own one too */
  void* const* segments; /* [num_ranks][DEEPEP_MAX_SEGMENTS] segment bases, as mapped here */
  void** segment_cache;  /* the same, zeros at first, nearer to the kernels; NULL: not needed */
  DeepEpFault* fault;
  uint64_t timeout_ns; /* of each wait */
  void* const* workspaces; /* [num_ranks] low-latency workspaces, as mapped here; NULL: none */
  uint64_t workspace_bytes; /* of each */
  int32_t (*is_interrupted)(void); /* asked now and then by a wait of "host", in the caller's
                                    * thread; not 0: the wait ends. NULL: never */
} DeepEpContext;

/* get_dispatch_layout: who needs my tokens. */
typedef struct DeepEpLayoutArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  int32_t num_ranks;
  int32_t num_experts;
  int32_t num_tokens;
  int32_t num_topk;
  int32_t idx_bytes;    /* 4 or 8 */
  const void* topk_idx; /* [num_tokens][num_topk]; -1: no selection */
  int32_t* num_tokens_per_rank;   /* [num_ranks] out */
  int32_t* num_tokens_per_expert; /* [num_experts] out */
  uint8_t* is_token_in_rank;      /* [num_tokens][num_ranks] out, 0 or 1 */
  int32_t* scratch; /* [1 + num_ranks + num_experts], zeros before and after, for one layout at a
                     * time; not used on "host" */
} DeepEpLayoutArgs;

/* Count exchange: afterwards every rank knows where each of its rows goes. */
typedef struct DeepEpNotifyArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  int32_t num_tokens;
  int32_t num_experts;
  const int32_t* num_tokens_per_rank;   /* [num_ranks] */
  const int32_t* num_tokens_per_expert; /* [num_experts] */
  const uint8_t* is_token_in_rank;      /* [num_tokens][num_ranks] */
  int32_t*
      rank_prefix; /* [num_ranks][num_ranks] out: [i][r] rows that rank r gets from ranks 0..i */
  int32_t* send_row;    /* [num_tokens][num_ranks] out: row in the receiver's tensor, or -1 */
  int32_t* num_recv_per_expert; /* [local experts] out, not aligned */
  DeepEpCounts* counts;         /* out, host-readable; NULL: nobody waits */
  uint64_t ticket;              /* stored into counts->ticket when it is complete */
} DeepEpNotifyArgs;

/* Dispatch: every row written once, straight to its place in the receivers' tensors. */
typedef struct DeepEpDispatchArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  int32_t num_tokens;
  int32_t hidden; /* elements of a row; must equal the variant's unless that is 0 */
  int32_t num_scales; /* 4-byte scales per row; 0: none */
  int32_t num_topk;   /* 0: no top-k tensors travel */
  int32_t num_experts;
  int32_t idx_bytes; /* 4 or 8 */
  const void* x;     /* [num_tokens][hidden] */
  const void* x_scales;       /* strided [num_tokens][num_scales] */
  int64_t scale_token_stride; /* in 4-byte elements */
  int64_t scale_group_stride;
  const void* topk_idx;      /* [num_tokens][num_topk] */
  const float* topk_weights; /* [num_tokens][num_topk] */
  const int32_t* send_row;    /* [num_tokens][num_ranks] */
  const int32_t* rank_prefix; /* [num_ranks][num_ranks] */
  int32_t recv_capacity;      /* rows that the tensors below hold */
  int32_t fill_tail;          /* 1: ids of rows past the last received one become -1 */
  void* recv_x;               /* [recv_capacity][hidden]; the locators name the same memory */
  void* recv_x_scales;        /* [recv_capacity][num_scales] */
  void* recv_topk_idx;        /* [recv_capacity][num_topk] local expert or -1 */
  float* recv_topk_weights;   /* [recv_capacity][num_topk] */
  int32_t* recv_src_idx;      /* [recv_capacity] token index on its source rank; may be NULL */
  DeepEpLocator at_x;
  DeepEpLocator at_x_scales;
  DeepEpLocator at_topk_idx;
  DeepEpLocator at_topk_weights;
  DeepEpLocator at_src_idx;
} DeepEpDispatchArgs;

/* Combine: each rank pulls its tokens' rows from the ranks that hold them and sums in FP32. */
typedef struct DeepEpCombineArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  int32_t num_tokens; /* rows of the result */
  int32_t num_recv;   /* rows of x */
  int32_t hidden;
  int32_t num_topk;  /* 0: no weights travel */
  const void* x;     /* [num_recv][hidden] BF16 */
  void* x_exported;  /* where peers read x; == x, or exported memory that x is copied to first */
  const float* topk_weights; /* [num_recv][num_topk] */
  float* topk_weights_exported;
  DeepEpLocator at_x; /* of x_exported */
  DeepEpLocator at_topk_weights;
  const void* bias_0; /* [num_tokens][hidden] BF16 or NULL */
  const void* bias_1;
  const int32_t* send_row;      /* [num_tokens][num_ranks] */
  void* combined_x;             /* [num_tokens][hidden] BF16 out */
  float* combined_topk_weights; /* [num_tokens][num_topk] out */
} DeepEpCombineArgs;

/* Facts of this library. Never fails. A library has the operations of its topology: layout, notify,
 * dispatch and combine, or those of deepep_lowlatency.h, or those of deepep_internode.h. */
DEEPEP_API const DeepEpVariantInfo* deepep_variant(void);

/* Why the last call on this thread did not return DEEPEP_OK, in words. Empty after a timeout,
 * mismatch or capacity fault: those are told by the fault record. */
DEEPEP_API const char* deepep_last_error(void);

/* The operations. On "host" they have finished when they return; on a GPU they are launched. */
DEEPEP_API int32_t deepep_layout(const DeepEpLayoutArgs* args);
DEEPEP_API int32_t deepep_notify(const DeepEpNotifyArgs* args);
DEEPEP_API int32_t deepep_dispatch(const DeepEpDispatchArgs* args);
DEEPEP_API int32_t deepep_combine(const DeepEpCombineArgs* args);

#endif /* DEEPEP_KERNEL_H_ */
