// One operation of one rank: its epoch, its waits with a timeout, the fault record they write.
// Used by every protocol. Needs the primitives of one arch/ header, included before it.
#ifndef KERNELS_DEVICE_OPERATION_H_
#define KERNELS_DEVICE_OPERATION_H_

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/control.h"

namespace deepep {

// A number known at compile time, or given at run time when the variant leaves it open (0).
template <int kStatic>
DEEPEP_DEVICE int known_or(int at_run_time) {
  return kStatic != 0 ? kStatic : at_run_time;
}

class Operation {
 public:
  DEEPEP_DEVICE Operation(const DeepEpContext& context, DeepEpOp op)
      : Operation(context, op, &own_block(context)->ops[op],
                  arch::load_relaxed(&own_block(context)->ops[op].epoch) + 1) {}
  // For kinds that share one count of operations: `state` is theirs, `epoch` this operation's.
  DEEPEP_DEVICE Operation(const DeepEpContext& context, DeepEpOp op, OpState* state, uint64_t epoch)
      : context_(context), own_(own_block(context)), state_(state), op_(op), epoch_(epoch) {}

  DEEPEP_DEVICE Control* control(int rank) const {
    return static_cast<Control*>(context_.control[rank]);
  }
  DEEPEP_DEVICE Control* own() const { return own_; }
  DEEPEP_DEVICE OpState* state() const { return state_; }
  DEEPEP_DEVICE const DeepEpContext& context() const { return context_; }
  DEEPEP_DEVICE int rank() const { return context_.rank; }
  DEEPEP_DEVICE DeepEpOp op() const { return op_; }
  DEEPEP_DEVICE uint64_t epoch() const { return epoch_; }
  DEEPEP_DEVICE bool has_failed() const { return state()->failed != 0; }

  // Where `at` lies as mapped here. The owner of the memory published `at` only after every peer
  // had entered the segment into its table (kernels/runtime/directory.h).
  DEEPEP_DEVICE char* locate(int owner, DeepEpLocator at) const {
    const uint64_t segment = at >> 48;
    const uint64_t offset = at & ((uint64_t{1} << 48) - 1);
    const int64_t slot = static_cast<int64_t>(owner) * DEEPEP_MAX_SEGMENTS + segment;
    return reinterpret_cast<char*>(segment_base(slot)) + offset;
  }

  // Looks at `word` until ready(value) or the timeout; returns the last value. `expected` is for
  // the fault record. Every later wait of this operation gives up at once after the first that did.
  template <class Ready>
  DEEPEP_DEVICE uint64_t wait(const uint64_t* word, int peer, DeepEpPhase phase, uint64_t expected,
                              Ready ready) {
    uint64_t value;
    if (!arrives(word, ready, &value)) fail(absence(), phase, peer, expected, value);
    return value;
  }

  // The same without a fault: whether it came, and the last value. Asks stop() before, and from
  // time to time, whether there is nothing to wait for any more.
  template <class Ready, class Stop>
  DEEPEP_DEVICE bool arrives(const uint64_t* word, Ready ready, uint64_t* value, Stop stop) {
    *value = arch::load_acquire(word);
    if (ready(*value)) return true;
    if (deadline_ == 0) deadline_ = arch::now_ns() + context_.timeout_ns;
    arch::Backoff backoff;
    for (unsigned looks = 0; !ready(*value); ++looks) {
      if (arch::now_ns() >= deadline_) return false;
      if (looks % kLooks == 0 && (stop() || is_interrupted(looks))) return false;
      backoff.pause();
      *value = arch::load_acquire(word);
    }
    return true;
  }

  template <class Ready>
  DEEPEP_DEVICE bool arrives(const uint64_t* word, Ready ready, uint64_t* value) {
    return arrives(word, ready, value, [] { return false; });
  }

  // A new phase has the whole timeout again.
  DEEPEP_DEVICE void start_phase() { deadline_ = 0; }

  DEEPEP_DEVICE void fail(DeepEpStatus code, DeepEpPhase phase, int peer, uint64_t expected,
                          uint64_t seen) {
    report(code, phase, &DeepEpFault::peers, peer, expected, seen);
  }
  // The same of the rank of this rail on another node.
  DEEPEP_DEVICE void fail_rail(DeepEpStatus code, DeepEpPhase phase, int node, uint64_t expected,
                               uint64_t seen) {
    report(code, phase, &DeepEpFault::nodes, node, expected, seen);
  }

  // For all threads of a team: did any of them give up a wait?
  template <class Team>
  DEEPEP_DEVICE bool ok(Team team) const {
    team.sync();
    return !team.any(failed_);
  }

  // The last block's farewell; the next kernel of this kind reads the epoch.
  DEEPEP_DEVICE void close() const {
    OpState* s = state();
    s->staged = 0;
    s->arrivals = 0;
    arch::store_relaxed(&s->epoch, epoch_);
  }

  // Why a peer is said not to have come.
  DEEPEP_DEVICE DeepEpStatus absence() const {
    return interrupted_ ? DEEPEP_INTERRUPTED : DEEPEP_TIMEOUT;
  }
  // Whether the caller wants the wait to end; not asked before it is one of milliseconds.
  DEEPEP_DEVICE bool is_interrupted(unsigned looks) {
    if constexpr (arch::kAsksCaller) {
      if (!interrupted_ && looks >= kPatience && context_.is_interrupted != nullptr) {
        interrupted_ = context_.is_interrupted() != 0;
      }
    }
    return interrupted_;
  }
  static constexpr unsigned kLooks = 64, kPatience = 1024;  // between, and before, such questions

 protected:
  bool failed_ = false;  // this thread has given up a wait
  bool interrupted_ = false;  // its caller wants that

 private:
  // Adds to the fault record if it is of this kind of fault, or nobody has begun it.
  DEEPEP_DEVICE void report(DeepEpStatus code, DeepEpPhase phase, uint64_t DeepEpFault::* mask,
                            int bit, uint64_t expected, uint64_t seen) {
    failed_ = true;
    DeepEpFault* fault = context_.fault;
    const uint32_t earlier = arch::exchange_if_zero(&fault->claimed, code);
    if (earlier == 0 || earlier == static_cast<uint32_t>(code)) {
      arch::fetch_or(&(fault->*mask), uint64_t{1} << bit);
    }
    if (earlier == 0) {
      fault->op = op_;
      fault->phase = phase;
      fault->rank = static_cast<uint32_t>(context_.rank);
      fault->epoch = epoch_;
      fault->expected = expected;
      fault->seen = seen;
      // Acquired by the host, which then reads the rest.
      arch::store_fault_code(&fault->code, code);
    }
    // Operations of other kinds that follow on the stream rely on what this one should have done.
    for (OpState& state : own_->ops) state.failed = 1;
  }

  // A slot of the table is written once, before anybody publishes an address in its segment.
  DEEPEP_DEVICE uint64_t segment_base(int64_t slot) const {
    auto* cached = reinterpret_cast<uint64_t*>(context_.segment_cache);
    if (cached != nullptr) {
      const uint64_t base = arch::load_relaxed(cached + slot);
      if (base != 0) return base;
    }
    const auto* table = reinterpret_cast<const uint64_t*>(context_.segments);
    const uint64_t base = arch::load_relaxed(table + slot);
    if (cached != nullptr) arch::store_relaxed(cached + slot, base);
    return base;
  }

  static DEEPEP_DEVICE Control* own_block(const DeepEpContext& context) {
    return static_cast<Control*>(context.control[context.rank]);
  }

  const DeepEpContext& context_;
  Control* own_;
  OpState* state_;
  DeepEpOp op_;
  uint64_t epoch_;
  uint64_t deadline_ = 0;
};

}  // namespace deepep

#endif  // KERNELS_DEVICE_OPERATION_H_
