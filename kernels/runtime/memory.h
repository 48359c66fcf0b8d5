// Memory that other ranks can map: how it is made, described to a peer, and opened by it.
// Used by the directory, the pool and the domain. Knows nothing of what lies in it.
#ifndef KERNELS_RUNTIME_MEMORY_H_
#define KERNELS_RUNTIME_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deepep {

// Describes a Memory to a peer on the same machine. Plain bytes: travels through any channel.
struct MemoryHandle {
  uint64_t process;  // process_id() of the owner
  uint64_t address;  // where it lies in the owner
  uint64_t bytes;
  uint64_t inode;    // tells a file from another that happens to have the same number
  int32_t pid;       // of the owner, as the owner sees it
  int32_t fd;        // of the owner
};

// A number that no two processes share, also after a fork.
uint64_t process_id();

// A piece of shared memory, zeroed when made. An anonymous file: it has no name in /dev/shm, so
// nothing is left behind however a process ends, and /dev/shm's size limit does not apply.
class Memory {
 public:
  // Makes a new one. Throws std::runtime_error with the size and the cause.
  static std::shared_ptr<Memory> create(size_t bytes);

  // Opens a peer's; in the same process that is the peer's own object. Throws std::runtime_error.
  static std::shared_ptr<Memory> open(const MemoryHandle& handle);

  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  MemoryHandle handle() const;

 private:
  Memory(char* data, size_t bytes, int fd) : data_(data), bytes_(bytes), fd_(fd) {}

  char* data_;
  size_t bytes_;
  int fd_;  // -1 in a peer
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_MEMORY_H_
