// Memory that cannot be had: MemoryError in Python, where every other failure is a RuntimeError.
#ifndef KERNELS_RUNTIME_OUT_OF_MEMORY_H_
#define KERNELS_RUNTIME_OUT_OF_MEMORY_H_

#include <new>
#include <string>
#include <utility>

namespace deepep {

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_OUT_OF_MEMORY_H_
