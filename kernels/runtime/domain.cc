// Set-up, exchange and tear-down of a rank's part in a memory domain.
#include "kernels/runtime/domain.h"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace deepep {
namespace {

struct Description {
  uint32_t abi_version;
  uint32_t control_bytes;
  int32_t rank;
  int32_t num_ranks;
  MemoryHandle control;
  MemoryHandle board;
};

// A peer's description, if it is of the same build and of that rank.
Description parse(const std::string& bytes, int rank, int num_ranks) {
  const std::string who = "rank " + std::to_string(rank);
  Description peer{};
  if (bytes.size() == sizeof(peer)) std::memcpy(&peer, bytes.data(), sizeof(peer));
  if (peer.abi_version != DEEPEP_ABI_VERSION || peer.control_bytes != sizeof(Control)) {
    throw std::runtime_error(
        who + " runs another build of deepep (ABI " + std::to_string(peer.abi_version) + ", here " +
        std::to_string(DEEPEP_ABI_VERSION) + "); install one version everywhere");
  }
  if (peer.rank != rank || peer.num_ranks != num_ranks) {
    throw std::invalid_argument("the description at " + who + " is of rank " +
                                std::to_string(peer.rank) + " of " +
                                std::to_string(peer.num_ranks));
  }
  return peer;
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

Domain::Domain(int rank, int num_ranks, int device, bool fabric) : control_(num_ranks) {
  if (num_ranks < 1 || num_ranks > DEEPEP_MAX_RANKS || rank < 0 || rank >= num_ranks) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " +
                                std::to_string(num_ranks) + ": a memory domain has 1 to " +
                                std::to_string(DEEPEP_MAX_RANKS) + " ranks");
  }
  place_ = Place::make(device, num_ranks, fabric);
  Place* place = place_.get();
  control_[rank] = Memory::create(place->space(), sizeof(Control));
  directory_ = std::make_unique<Directory>(
      rank, num_ranks, [place](int index, void* base) { place->set_segment(index, base); },
      [place] { place->enter_thread(); });
  Directory* directory = directory_.get();
  pool_ = std::make_shared<Pool>(place->space(), [directory](std::shared_ptr<Memory> memory) {
    return directory->post(std::move(memory));
  });
  context_.struct_size = sizeof(context_);
  context_.rank = rank;
  context_.num_ranks = num_ranks;
  context_.control = place->control_table();
  context_.segments = place->segment_table();
  context_.segment_cache = place->segment_cache();
  context_.fault = &place->mailbox()->fault;
  context_.timeout_ns = 100ull * 1000000000ull;
}

Domain::~Domain() {
  try {
    place_->enter_thread();
  } catch (const std::exception&) {
    // A device that is gone takes its memory along; what the host holds is let go all the same.
  }
  close();
}

std::string Domain::describe() const {
  Description description{};
  description.abi_version = DEEPEP_ABI_VERSION;
  description.control_bytes = sizeof(Control);
  description.rank = context_.rank;
  description.num_ranks = context_.num_ranks;
  description.control = control_[context_.rank]->handle();
  description.board = directory_->handle();
  return std::string(reinterpret_cast<const char*>(&description), sizeof(description));
}

void Domain::connect(const std::vector<std::string>& descriptions) {
  if (descriptions.size() != control_.size()) {
    throw std::invalid_argument(std::to_string(descriptions.size()) + " descriptions for " +
                                std::to_string(control_.size()) + " ranks");
  }
  place_->enter_thread();
  std::vector<MemoryHandle> boards;
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const Description peer = parse(descriptions[rank], rank, context_.num_ranks);
    if (rank != context_.rank) control_[rank] = Memory::open(peer.control);
    place_->set_control(rank, control_[rank]->data());
    boards.push_back(peer.board);
  }
  directory_->connect(boards);
}

DeepEpLocator Domain::locate(const void* data, size_t bytes) const {
  const DeepEpLocator pooled = pool_->locate(data, bytes);
  if (pooled != DEEPEP_NO_LOCATOR || place_->space() == Space::kHost) return pooled;
  const auto at = reinterpret_cast<cuda::DevicePtr>(data);
  const auto found = find(at, bytes);
  if (found == exports_.end()) return DEEPEP_NO_LOCATOR;
  return static_cast<uint64_t>(found->second.slot) << 48 | (at - found->first);
}

std::map<cuda::DevicePtr, Domain::Export>::const_iterator Domain::find(cuda::DevicePtr at,
                                                                       size_t bytes) const {
  const auto next = exports_.upper_bound(at);
  if (next == exports_.begin()) return exports_.end();
  const auto found = std::prev(next);
  if (at + bytes > found->first + found->second.bytes) return exports_.end();
  // Freed meanwhile, and perhaps another allocation has its addresses: peers have the old one open.
  return cuda::allocation_id(at) == found->second.id ? found : exports_.end();
}

void Domain::export_allocation(const void* data) {
  const auto at = reinterpret_cast<cuda::DevicePtr>(data);
  if (find(at, 1) != exports_.end()) return;
  const cuda::Range range = cuda::range_of(at);
  const int slot = directory_->post(Memory::adopt(range.base, range.bytes));
  // Whatever overlapped it has been freed, also what begins before it.
  auto first = exports_.lower_bound(range.base);
  if (first != exports_.begin()) {
    const auto before = std::prev(first);
    if (before->first + before->second.bytes > range.base) first = before;
  }
  exports_.erase(first, exports_.lower_bound(range.base + range.bytes));
  exports_[range.base] = {range.bytes, range.id, slot};
}

int32_t Domain::record(DeepEpStatus code, DeepEpOp op, DeepEpPhase phase, uint64_t peers,
                       uint64_t expected) {
  DeepEpFault& fault = place_->mailbox()->fault;
  fault.op = op;
  fault.phase = phase;
  fault.rank = static_cast<uint32_t>(context_.rank);
  fault.epoch = epochs()[op] + 1;
  fault.peers = peers;
  fault.expected = expected;
  fault.seen = 0;
  fault.claimed = code;
  fault.code = code;
  return code;
}

int32_t Domain::await_opened(DeepEpLocator at, DeepEpOp op) {
  if (at == DEEPEP_NO_LOCATOR) return DEEPEP_OK;
  if (directory_ == nullptr) throw std::runtime_error("this Buffer has been destroyed");
  const int slot = static_cast<int>(at >> 48);
  bool interrupted = false;
  const uint64_t missing = directory_->wait_opened(slot, context_.timeout_ns,
                                                   [&] { return interrupted = is_interrupted(); });
  if (missing == 0) return DEEPEP_OK;
  return record(interrupted ? DEEPEP_INTERRUPTED : DEEPEP_TIMEOUT, op, DEEPEP_PHASE_SEGMENT,
                missing, static_cast<uint64_t>(slot) + 1);
}

void Domain::set_workspaces(const std::vector<DeepEpLocator>& places, uint64_t bytes) {
  if (places.size() != control_.size()) throw std::invalid_argument("one workspace for each rank");
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const uint64_t segment = places[rank] >> 48, offset = places[rank] & ((uint64_t{1} << 48) - 1);
    const uint64_t slot = static_cast<uint64_t>(rank) * DEEPEP_MAX_SEGMENTS + segment;
    char* base = static_cast<char*>(place_->segment_table()[slot]);
    if (base == nullptr)
      throw std::runtime_error("rank " + std::to_string(rank) +
                               "'s workspace has not been opened here");
    place_->set_workspace(rank, base + offset);
  }
  context_.workspaces = place_->workspace_table();
  context_.workspace_bytes = bytes;
}

int32_t Domain::await_counts(uint64_t ticket, uint64_t limit_ns) {
  Mailbox* mailbox = place_->mailbox();
  // Between two launches every microsecond counts, and a sleep takes some 70 of them. So sleeping
  // is for ranks that wait for a late peer; before that others may have the core.
  const uint64_t start = now_ns(), deadline = start + limit_ns, patience = 5000000;  // ns
  for (uint64_t looks = 0;; ++looks) {
    if (__atomic_load_n(&mailbox->counts.ticket, __ATOMIC_ACQUIRE) == ticket) return DEEPEP_OK;
    const auto code = __atomic_load_n(&mailbox->fault.code, __ATOMIC_ACQUIRE);
    if (code != DEEPEP_OK) return static_cast<int32_t>(code);
    if (looks < 10000) continue;  // some 50 us
    const uint64_t now = now_ns();
    if (now - start < patience) {
      std::this_thread::yield();
      continue;
    }
    const bool interrupted = looks % 256 == 0 && is_interrupted();
    if (interrupted || now > deadline) {
      return record(interrupted ? DEEPEP_INTERRUPTED : DEEPEP_TIMEOUT, DEEPEP_OP_NOTIFY,
                    DEEPEP_PHASE_COUNTS, uint64_t{1} << context_.rank, ticket);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::vector<uint64_t> Domain::epochs() const {
  OpState ops[DEEPEP_NUM_OPS];
  place_->read_ops(own(), ops);
  std::vector<uint64_t> epochs;
  for (const OpState& state : ops) epochs.push_back(state.epoch);
  return epochs;
}

void Domain::reset(const std::vector<uint64_t>& epochs) {
  if (epochs.size() != DEEPEP_NUM_OPS) throw std::invalid_argument("one epoch for each operation");
  OpState ops[DEEPEP_NUM_OPS] = {};
  for (int op = 0; op < DEEPEP_NUM_OPS; ++op) ops[op].epoch = epochs[op];
  place_->write_ops(own(), ops);
  place_->mailbox()->fault = DeepEpFault{};
}

void Domain::close() {
  pool_->retire();
  directory_.reset();
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (rank != context_.rank) control_[rank].reset();
  }
}

}  // namespace deepep
