// Memory that other ranks can map: how it is made, described to a peer, and opened by it.
// Used by the directory, the pool and the domain. Knows nothing of what lies in it.
#ifndef KERNELS_RUNTIME_MEMORY_H_
#define KERNELS_RUNTIME_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/runtime/cuda_driver.h"

namespace deepep {

// kFabric is device memory that is exported by fabric handle.
enum class Space : int32_t { kHost = 0, kDevice = 1, kFabric = 2 };

// Describes a Memory to a peer on the same machine. Plain bytes: travels through any channel.
struct MemoryHandle {
  uint64_t process;  // process_id() of the owner
  uint64_t address;  // where it lies in the owner
  uint64_t bytes;
  uint64_t inode;    // host: tells a file from another that happens to have the same number
  int32_t pid;       // host: of the owner, as the owner sees it
  int32_t fd;        // host: of the owner
  Space space;
  int32_t reserved;
  cuda::IpcHandle ipc;        // device
  cuda::FabricHandle fabric;  // fabric
};

// A number that no two processes share, also after a fork.
uint64_t process_id();

// A piece of memory that peers can map. Host memory is an anonymous file: it has no name in
// /dev/shm, so nothing is left behind however a process ends, and /dev/shm's size limit does not
// apply. Device memory is exported by CUDA IPC, or by fabric handle.
class Memory {
 public:
  // Makes a new one, zeroed. Throws std::runtime_error with the size and the cause.
  static std::shared_ptr<Memory> create(Space space, size_t bytes);

  // Describes an allocation that somebody else owns and keeps while it is in use.
  static std::shared_ptr<Memory> adopt(cuda::DevicePtr base, size_t bytes);

  // Opens a peer's; in the same process that is the peer's own object (host), or the same address
  // (device). Throws std::runtime_error.
  static std::shared_ptr<Memory> open(const MemoryHandle& handle);

  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  virtual MemoryHandle handle() const = 0;

 protected:
  Memory(char* data, size_t bytes) : data_(data), bytes_(bytes) {}

 private:
  char* data_;
  size_t bytes_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_MEMORY_H_
