// Exportable memory for tensors on the "host" architecture: what peers write to and read from.
// Blocks come back when their tensor dies, on any thread, and are reused warm.
#ifndef KERNELS_RUNTIME_POOL_H_
#define KERNELS_RUNTIME_POOL_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/runtime/memory.h"

namespace deepep {

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  struct Piece {
    char* data;
    size_t bytes;
    int segment;  // slot in the directory
    size_t offset;
  };

  // `post` announces a new segment and returns its slot (Directory::post).
  using Post = std::function<int(std::shared_ptr<Memory>)>;
  Pool(Space space, Post post) : space_(space), post_(std::move(post)) {}

  // Best fit among the free pieces, else a new segment. At least one byte. Throws
  // OutOfMemory with the numbers when no memory can be had.
  Piece allocate(size_t bytes);
  void release(const Piece& piece);

  // The domain has closed: what is out may come back, nothing new is given.
  void retire();

  // The place of [data, data + bytes) in exported memory, or DEEPEP_NO_LOCATOR.
  DeepEpLocator locate(const void* data, size_t bytes) const;

  size_t reserved_bytes() const;
  size_t used_bytes() const;

 private:
  struct Segment {
    std::shared_ptr<Memory> memory;
    int slot;
    std::map<size_t, size_t> free;  // offset -> bytes; neighbours are merged
  };

  const Space space_;
  mutable std::mutex mutex_;
  Post post_;
  std::vector<Segment> segments_;
  size_t used_ = 0;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_POOL_H_
