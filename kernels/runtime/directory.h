// The segment directory of one domain: an owner posts a new segment, a service thread of every peer
// opens it and acknowledges. Only then does the owner publish addresses in it, so kernels never
// meet a segment that they cannot translate, and nobody's main thread has to be awake.
#ifndef KERNELS_RUNTIME_DIRECTORY_H_
#define KERNELS_RUNTIME_DIRECTORY_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/runtime/memory.h"

namespace deepep {

// One rank's page of the directory, in shared memory. Starts as zeros.
struct Board {
  std::atomic<uint32_t> doorbell;  // rung (futex) when some peer has posted
  std::atomic<uint32_t> closed;
  std::atomic<uint64_t> posted;  // segments posted so far; release, acquired by service threads
  std::atomic<uint64_t> opened[DEEPEP_MAX_RANKS];  // [peer]: of them, how many the peer has opened
  MemoryHandle segments[DEEPEP_MAX_SEGMENTS];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

class Directory {
 public:
  // `enter` puts a segment's base into the table that kernels read, at [rank][segment]; what it has
  // done is visible to kernels launched later. `on_start` prepares the service thread.
  using Enter = std::function<void(int index, void* base)>;
  Directory(int rank, int num_ranks, Enter enter, std::function<void()> on_start);
  ~Directory();

  MemoryHandle handle() const { return boards_[rank_]->handle(); }

  // Opens the peers' boards and starts the service thread.
  void connect(const std::vector<MemoryHandle>& boards);

  // Adds a segment of this rank and tells the peers. Throws when all slots are taken.
  int post(std::shared_ptr<Memory> memory);

  // Bit r: rank r has not opened all segments up to `slot`. One load a peer.
  uint64_t not_opened(int slot) const;
  // Waits until that is 0, the timeout, or stop() says so; returns what is left.
  uint64_t wait_opened(int slot, uint64_t timeout_ns, const std::function<bool()>& stop) const;

  // Why the service thread could not open a peer's segment; empty while all is well.
  std::string error() const;

 private:
  Board* board(int rank) const { return reinterpret_cast<Board*>(boards_[rank]->data()); }
  void serve();
  void open_posted(int peer);

  const int rank_;
  const int num_ranks_;
  const Enter enter_;
  const std::function<void()> on_start_;
  std::vector<std::shared_ptr<Memory>> boards_;
  std::vector<std::shared_ptr<Memory>> opened_;  // kept mapped; only the service thread touches it
  std::vector<std::shared_ptr<Memory>> own_;
  std::shared_ptr<const std::string> error_;  // accessed through std::atomic_load/store
  uint64_t owner_ = 0;  // process_id() of who started the service
  std::thread service_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_DIRECTORY_H_
