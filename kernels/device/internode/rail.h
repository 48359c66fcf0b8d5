// The rail of one operation: its queues to and from the same rank of every other node, and the loop
// in which a team looks after its share of them. No step waits, so that one thread can be a whole
// rank, and a queue that is held up holds up no other.
#ifndef KERNELS_DEVICE_INTERNODE_RAIL_H_
#define KERNELS_DEVICE_INTERNODE_RAIL_H_

#include "kernels/device/internode/memory.h"
#include "kernels/device/operation.h"

namespace deepep {

enum class Step { kIdle, kMoved, kFinished };

// Two directions: messages and the sender's words, and the receiver's words back.
enum RailDirection { kForth = 0, kBack = 1 };

struct Rail {
  Operation& op;
  const arch::Network& network;
  const RailKind kind;
  const int node, num_nodes, num_channels;
  const RailMemory at;
  const Rings rings;

  DEEPEP_DEVICE Rail(Operation& op, const arch::Network& network, const DeepEpNetwork& facts,
                     RailKind kind, int num_nodes, int ranks_per_node, int64_t message_bytes)
      : op(op),
        network(network),
        kind(kind),
        node(facts.node),
        num_nodes(num_nodes),
        num_channels(facts.num_channels),
        at(num_nodes, ranks_per_node),
        rings(at, static_cast<int64_t>(facts.bytes), kind, facts.num_channels, message_bytes) {}

  // ---- Roles: one for each queue, numbered so that a team's share is of different nodes

  DEEPEP_DEVICE int num_queues() const { return (num_nodes - 1) * num_channels; }
  DEEPEP_DEVICE int node_of(int queue) const {
    const int other = queue % (num_nodes - 1);
    return other < node ? other : other + 1;
  }
  DEEPEP_DEVICE int channel_of(int queue) const { return queue / (num_nodes - 1); }

  // ---- Words

  DEEPEP_DEVICE int64_t offset(int64_t base, int of_node, int channel) const {
    return base + at.queue(kind, of_node, channel);
  }
  DEEPEP_DEVICE const uint64_t* word(int64_t base, int of_node, int channel) const {
    return reinterpret_cast<const uint64_t*>(network.own(offset(base, of_node, channel)));
  }
  DEEPEP_DEVICE QueueNotes* notes(int64_t base, int of_node, int channel) const {
    return reinterpret_cast<QueueNotes*>(network.own(offset(base, of_node, channel)));
  }
  // The message that is next at a receiving end.
  DEEPEP_DEVICE char* received(int from_node, int channel) const {
    const QueueNotes* queue = notes(at.receiving, from_node, channel);
    return network.own(rings.slot(rings.in, from_node, channel, queue->count - queue->base));
  }
  DEEPEP_DEVICE int transport_queue(RailDirection direction, int to_node, int channel) const {
    return ((kind * 2 + direction) * num_nodes + to_node) * DEEPEP_MAX_CHANNELS + channel;
  }
};

// Tells the rail that this rank has begun, and with which arguments; by one team.
template <class Team>
DEEPEP_DEVICE void send_hello(const Rail& rail, Team team, uint64_t signature) {
  for (int other = 0; other < rail.num_nodes; ++other) {
    if (other == rail.node) continue;
    const int queue = rail.transport_queue(kForth, other, 0);
    const int64_t line = rail.at.hello + (rail.kind * rail.num_nodes + rail.node) * kWordBytes;
    rail.network.put_word(team, other, queue, line + 8, signature);
    rail.network.put_word(team, other, queue, line, rail.op.epoch());  // acquired by has_begun
  }
}

// Whether the rank on `node` has begun this operation; one that has begun a later one has, too.
// Fails where it has other arguments.
template <class Team>
DEEPEP_DEVICE bool has_begun(const Rail& rail, Team team, int node, uint64_t signature) {
  const int64_t line = rail.at.hello + (rail.kind * rail.num_nodes + node) * kWordBytes;
  const auto* words = reinterpret_cast<const uint64_t*>(rail.network.own(line));
  const uint64_t seen = arch::load_acquire(words);
  if (!team.any(seen >= rail.op.epoch())) return false;
  team.sync();
  const uint64_t theirs = arch::load_relaxed(words + 1);
  if (seen == rail.op.epoch() && theirs != signature) {
    rail.op.fail_rail(DEEPEP_MISMATCH, DEEPEP_PHASE_RAIL, node, signature, theirs);
  }
  return true;
}

// The first step of an operation: what its role notes begins anew, at `next`.
template <class Team>
DEEPEP_DEVICE void begin_notes(Team team, QueueNotes* notes, uint64_t epoch, int64_t next) {
  const bool is_new = notes->epoch != epoch;
  team.sync();
  if (is_new && team.lane() == 0) {
    notes->base = notes->count;
    notes->next = next;
    notes->finished = 0;
    notes->epoch = epoch;
  }
  team.sync();
}

// The sending end of a queue.
template <class Team>
class SendEnd {
 public:
  DEEPEP_DEVICE SendEnd(const Rail& rail, Team team, int node, int channel)
      : rail_(rail),
        team_(team),
        node_(node),
        channel_(channel),
        notes_(rail.notes(rail.at.sending, node, channel)) {
    begin_notes(team, notes_, rail.op.epoch(), channel);
  }

  DEEPEP_DEVICE QueueNotes& notes() const { return *notes_; }
  DEEPEP_DEVICE int node() const { return node_; }
  DEEPEP_DEVICE int channel() const { return channel_; }

  // Whether a slot is free: the receiver has said that it has read what was there.
  DEEPEP_DEVICE bool has_room() const {
    const uint64_t head = arch::load_acquire(rail_.word(rail_.at.heads, node_, channel_));
    bool room = notes_->count - head < static_cast<uint64_t>(rail_.rings.slots);
#ifdef DEEPEP_PLANT_OVERRUN  // a test expects to see messages overwritten
    room = true;
#endif
    return !team_.any(!room);
  }
  DEEPEP_DEVICE bool is_drained() const {
    return !team_.any(arch::load_acquire(rail_.word(rail_.at.heads, node_, channel_)) !=
                      notes_->count);
  }
  // Where the next message is put together.
  DEEPEP_DEVICE char* slot() const {
    return rail_.network.own(rail_.rings.slot(rail_.rings.out, node_, channel_, index()));
  }
  // Sends it; this rank's node is where the receiver looks for it.
  DEEPEP_DEVICE void push() {
    const int queue = rail_.transport_queue(kForth, node_, channel_);
    const Rings& rings = rail_.rings;
    team_.sync();
    rail_.network.put(team_, node_, queue, rings.slot(rings.in, rail_.node, channel_, index()),
                      rings.slot(rings.out, node_, channel_, index()), rings.message_bytes);
    // Acquired by ReceiveEnd::has_message.
    rail_.network.put_word(team_, node_, queue, rail_.offset(rail_.at.tails, rail_.node, channel_),
                           notes_->count + 1);
    team_.sync();
    if (team_.lane() == 0) ++notes_->count;
    team_.sync();
  }
  // Says that no message follows in this operation.
  DEEPEP_DEVICE void end() {
    const uint64_t sent = notes_->count - notes_->base;
    rail_.network.put_word(team_, node_, rail_.transport_queue(kForth, node_, channel_),
                           rail_.offset(rail_.at.ends, rail_.node, channel_),
                           rail_.op.epoch() << 32 | sent);
  }
  DEEPEP_DEVICE void advance(int64_t next) {
    team_.sync();
    if (team_.lane() == 0) notes_->next = next;
    team_.sync();
  }
  DEEPEP_DEVICE void finish() {
    team_.sync();
    if (team_.lane() == 0) notes_->finished = 1;
    team_.sync();
  }

 private:
  DEEPEP_DEVICE uint64_t index() const { return notes_->count - notes_->base; }

  const Rail& rail_;
  const Team team_;
  const int node_, channel_;
  QueueNotes* notes_;
};

// The receiving end of a queue.
template <class Team>
class ReceiveEnd {
 public:
  DEEPEP_DEVICE ReceiveEnd(const Rail& rail, Team team, int node, int channel)
      : rail_(rail),
        team_(team),
        node_(node),
        channel_(channel),
        notes_(rail.notes(rail.at.receiving, node, channel)) {
    begin_notes(team, notes_, rail.op.epoch(), channel);
  }

  DEEPEP_DEVICE QueueNotes& notes() const { return *notes_; }
  DEEPEP_DEVICE int node() const { return node_; }
  DEEPEP_DEVICE int channel() const { return channel_; }

  DEEPEP_DEVICE bool has_message() const {
    const bool has =
        arch::load_acquire(rail_.word(rail_.at.tails, node_, channel_)) > notes_->count;
    const bool any = team_.any(has);
    team_.sync();  // what the lane that saw it has acquired is seen by all
    return any;
  }
  DEEPEP_DEVICE char* message() const { return rail_.received(node_, channel_); }
  // The message has been read.
  DEEPEP_DEVICE void pop() {
    team_.sync();
    if (team_.lane() == 0) ++notes_->count;
    team_.sync();
    // Early enough for the sender not to run out of slots, and not for each message.
    const int64_t batch = rail_.rings.slots / 4;
    if (notes_->count - notes_->told > static_cast<uint64_t>(batch)) tell();
  }
  // Whether the sender has said that no more follow, and all have been read.
  DEEPEP_DEVICE bool is_at_end() const {
    const uint64_t end = arch::load_acquire(rail_.word(rail_.at.ends, node_, channel_));
    const uint64_t epoch = rail_.op.epoch() & 0xffffffffu;
    return !team_.any(end >> 32 != epoch || (end & 0xffffffffu) != notes_->count - notes_->base);
  }
  DEEPEP_DEVICE void finish() {
    if (notes_->told != notes_->count) tell();
    team_.sync();
    if (team_.lane() == 0) notes_->finished = 1;
    team_.sync();
  }

 private:
  DEEPEP_DEVICE void tell() {
    team_.sync();
    // Acquired by SendEnd::has_room, which then lets the slots be overwritten.
    rail_.network.put_word(team_, node_, rail_.transport_queue(kBack, node_, channel_),
                           rail_.offset(rail_.at.heads, rail_.node, channel_), notes_->count);
    if (team_.lane() == 0) notes_->told = notes_->count;
    team_.sync();
  }

  const Rail& rail_;
  const Team team_;
  const int node_, channel_;
  QueueNotes* notes_;
};

// Which teams look after roles: `count` of them, as far apart as the grid allows, so that they are
// of different blocks.
struct RoleTeams {
  int count, apart;

  DEEPEP_DEVICE RoleTeams(int num_teams, int num_roles)
      : count(num_roles < num_teams ? num_roles : num_teams), apart(num_teams / count) {}
  DEEPEP_DEVICE bool has(int team) const { return team % apart == 0 && team / apart < count; }
  DEEPEP_DEVICE int number(int team) const { return team / apart; }
  // Of the others, how many come before this one.
  DEEPEP_DEVICE int others_before(int team) const {
    const int before = (team + apart - 1) / apart;
    return team - (before < count ? before : count);
  }
};

// Looks after roles first, first + stride, ... until all have finished. `step(role)` does what can
// be done without waiting; `blame(role)` says whose absence it is when nothing moves for the
// timeout.
template <class Team, class DoStep, class Blame>
DEEPEP_DEVICE bool run_roles(Operation& op, Team team, int first, int count, int stride,
                             DoStep step, Blame blame) {
  uint64_t deadline = 0;
  arch::Backoff backoff;
  for (unsigned looks = 0;; ++looks) {
    bool moved = false, unfinished = false;
    for (int role = first; role < count; role += stride) {
      const Step result = step(role);
      moved |= result == Step::kMoved;
      unfinished |= result != Step::kFinished;
      if (!op.ok(team)) return false;
    }
    if (!unfinished) return true;
    if (moved) {
      deadline = 0, looks = 0, backoff = {};
      continue;
    }
    const uint64_t now = arch::now_ns();
    if (deadline == 0) deadline = now + op.context().timeout_ns;
    const bool late = now >= deadline || (looks % op.kLooks == 0 && op.is_interrupted(looks));
    if (team.any(late)) {
      for (int role = first; role < count; role += stride) {
        if (step(role) != Step::kFinished) blame(role);
      }
      return op.ok(team);
    }
    backoff.pause();
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTERNODE_RAIL_H_
