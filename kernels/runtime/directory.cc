// The boards, and the thread that reads them.
#include "kernels/runtime/directory.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>

namespace deepep {
namespace {

// std::atomic::wait is process-private; these cross processes.
void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, nullptr, nullptr, 0);
}
void ring(Board* board) {
  board->doorbell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&board->doorbell), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace

Directory::Directory(int rank, int num_ranks, Enter enter, std::function<void()> on_start)
    : rank_(rank),
      num_ranks_(num_ranks),
      enter_(std::move(enter)),
      on_start_(std::move(on_start)),
      boards_(num_ranks) {
  boards_[rank] = Memory::create(Space::kHost, sizeof(Board));
}

Directory::~Directory() {
  if (!service_.joinable()) return;
  if (owner_ != process_id()) {  // a child made by fork: board and thread are the parent's
    service_.detach();
    return;
  }
  board(rank_)->closed.store(1, std::memory_order_release);
  ring(board(rank_));
  service_.join();
}

void Directory::connect(const std::vector<MemoryHandle>& boards) {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer != rank_) boards_[peer] = Memory::open(boards[peer]);
  }
  owner_ = process_id();
  service_ = std::thread(&Directory::serve, this);
}

int Directory::post(std::shared_ptr<Memory> memory) {
  Board* mine = board(rank_);
  const uint64_t slot = mine->posted.load(std::memory_order_relaxed);
  if (slot >= DEEPEP_MAX_SEGMENTS) {
    throw std::runtime_error("all " + std::to_string(DEEPEP_MAX_SEGMENTS) +
                             " memory segments of this rank have been exported; make a new Buffer");
  }
  enter_(rank_ * DEEPEP_MAX_SEGMENTS + static_cast<int>(slot), memory->data());
  mine->segments[slot] = memory->handle();
  own_.push_back(std::move(memory));
  mine->opened[rank_].store(slot + 1, std::memory_order_relaxed);
  mine->posted.store(slot + 1, std::memory_order_release);  // acquired by open_posted of the peers
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer != rank_) ring(board(peer));
  }
  return static_cast<int>(slot);
}

uint64_t Directory::not_opened(int slot) const {
  uint64_t missing = 0;
  const Board* mine = board(rank_);
  for (int peer = 0; peer < num_ranks_; ++peer) {
    // Acquires the peer's release in open_posted: its table entry precedes what we publish next.
    const uint64_t opened = mine->opened[peer].load(std::memory_order_acquire);
    if (opened <= static_cast<uint64_t>(slot)) missing |= uint64_t{1} << peer;
  }
  return missing;
}

uint64_t Directory::wait_opened(int slot, uint64_t timeout_ns,
                                const std::function<bool()>& stop) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  uint64_t missing = not_opened(slot);
  for (int looks = 1; missing != 0 && std::chrono::steady_clock::now() < deadline; ++looks) {
    if (looks % 256 == 0 && stop()) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    missing = not_opened(slot);
  }
  return missing;
}

std::string Directory::error() const {
  const auto error = std::atomic_load(&error_);
  return error == nullptr ? std::string() : *error;
}

void Directory::serve() {
  on_start_();
  Board* mine = board(rank_);
  while (true) {
    const uint32_t seen = mine->doorbell.load(std::memory_order_acquire);
    if (mine->closed.load(std::memory_order_acquire) != 0) return;
    std::shared_ptr<const std::string> failure;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_) continue;
      try {
        open_posted(peer);
      } catch (const std::exception& error) {
        // The owner will time out and name this rank; this rank can say why.
        failure = std::make_shared<const std::string>(error.what());
      }
    }
    std::atomic_store(&error_, failure);
    futex_wait(&mine->doorbell, seen);
  }
}

void Directory::open_posted(int peer) {
  Board* theirs = board(peer);
  const uint64_t posted = theirs->posted.load(std::memory_order_acquire);
  uint64_t slot = theirs->opened[rank_].load(std::memory_order_relaxed);
  for (; slot < posted; ++slot) {
    std::shared_ptr<Memory> memory = Memory::open(theirs->segments[slot]);
    enter_(peer * DEEPEP_MAX_SEGMENTS + static_cast<int>(slot), memory->data());
    opened_.push_back(std::move(memory));
    // Acquired by the owner's not_opened. The owner's kernels then publish an address in this
    // segment, and this rank's kernels acquire that: so they see the table entry.
    theirs->opened[rank_].store(slot + 1, std::memory_order_release);
  }
}

}  // namespace deepep
