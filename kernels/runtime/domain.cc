// Set-up, exchange and tear-down of a rank's part in a memory domain.
#include "kernels/runtime/domain.h"

#include <cstring>
#include <stdexcept>

namespace deepep {

Domain::Domain(int rank, int num_ranks)
    : control_(num_ranks),
      control_data_(num_ranks),
      segment_table_(static_cast<size_t>(num_ranks) * DEEPEP_MAX_SEGMENTS) {
  if (num_ranks < 1 || num_ranks > DEEPEP_MAX_RANKS || rank < 0 || rank >= num_ranks) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " +
                                std::to_string(num_ranks) + ": a memory domain has 1 to " +
                                std::to_string(DEEPEP_MAX_RANKS) + " ranks");
  }
  control_[rank] = Memory::create(sizeof(Control));
  directory_ = std::make_unique<Directory>(rank, num_ranks, segment_table_.data());
  Directory* directory = directory_.get();
  pool_ = std::make_shared<Pool>(
      [directory](std::shared_ptr<Memory> memory) { return directory->post(std::move(memory)); });
  context_.struct_size = sizeof(context_);
  context_.rank = rank;
  context_.num_ranks = num_ranks;
  context_.control = control_data_.data();
  context_.segments = segment_table_.data();
  context_.fault = &fault_;
  context_.timeout_ns = 100ull * 1000000000ull;
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
  std::vector<MemoryHandle> boards;
  if (descriptions.size() != control_.size()) {
    throw std::invalid_argument(std::to_string(descriptions.size()) + " descriptions for " +
                                std::to_string(control_.size()) + " ranks");
  }
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    Description peer{};
    if (descriptions[rank].size() != sizeof(peer)) {
      throw std::runtime_error("rank " + std::to_string(rank) +
                               " runs another build of deepep: its description has " +
                               std::to_string(descriptions[rank].size()) + " bytes, not " +
                               std::to_string(sizeof(peer)) + "; install one version everywhere");
    }
    std::memcpy(&peer, descriptions[rank].data(), sizeof(peer));
    if (peer.abi_version != DEEPEP_ABI_VERSION || peer.control_bytes != sizeof(Control)) {
      throw std::runtime_error(
          "rank " + std::to_string(rank) + " runs another build of deepep (ABI " +
          std::to_string(peer.abi_version) + ", here " + std::to_string(DEEPEP_ABI_VERSION) +
          "); install one version everywhere");
    }
    if (peer.rank != rank || peer.num_ranks != context_.num_ranks) {
      throw std::invalid_argument("description " + std::to_string(rank) + " is of rank " +
                                  std::to_string(peer.rank) + " of " +
                                  std::to_string(peer.num_ranks));
    }
    if (rank != context_.rank) control_[rank] = Memory::open(peer.control);
    control_data_[rank] = control_[rank]->data();
    boards.push_back(peer.board);
  }
  directory_->connect(boards);
}

int32_t Domain::await_opened(DeepEpLocator at, DeepEpOp op) {
  if (at == DEEPEP_NO_LOCATOR) return DEEPEP_OK;
  const int slot = static_cast<int>(at >> 48);
  const uint64_t missing = directory_->wait_opened(slot, context_.timeout_ns);
  if (missing == 0) return DEEPEP_OK;
  fault_.code = DEEPEP_TIMEOUT;
  fault_.op = op;
  fault_.phase = DEEPEP_PHASE_SEGMENT;
  fault_.rank = static_cast<uint32_t>(context_.rank);
  fault_.epoch = own()->ops[op].epoch + 1;
  fault_.peers = missing;
  fault_.expected = static_cast<uint64_t>(slot) + 1;
  fault_.seen = 0;
  return DEEPEP_TIMEOUT;
}

std::vector<uint64_t> Domain::epochs() const {
  std::vector<uint64_t> epochs;
  for (const OpState& state : own()->ops) epochs.push_back(state.epoch);
  return epochs;
}

void Domain::reset(const std::vector<uint64_t>& epochs) {
  if (epochs.size() != DEEPEP_NUM_OPS) throw std::invalid_argument("one epoch for each operation");
  for (int op = 0; op < DEEPEP_NUM_OPS; ++op) {
    own()->ops[op] = OpState{};
    own()->ops[op].epoch = epochs[op];
  }
  fault_ = DeepEpFault{};
}

void Domain::close() {
  pool_->retire();
  directory_.reset();
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (rank != context_.rank) control_[rank].reset();
  }
}

}  // namespace deepep
