// A kernel library, loaded and checked.
#ifndef KERNELS_RUNTIME_LIBRARY_H_
#define KERNELS_RUNTIME_LIBRARY_H_

#include <string>

#include "kernels/abi/deepep_kernel.h"

namespace deepep {

class Library {
 public:
  // Opens the file with local visibility and compares its ABI with this runtime's. Throws
  // std::runtime_error naming both sides.
  explicit Library(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const DeepEpVariantInfo& info() const { return *info_; }
  std::string last_error() const { return last_error_(); }

  int32_t layout(const DeepEpLayoutArgs& args) const { return layout_(&args); }
  int32_t notify(const DeepEpNotifyArgs& args) const { return notify_(&args); }
  int32_t dispatch(const DeepEpDispatchArgs& args) const { return dispatch_(&args); }
  int32_t combine(const DeepEpCombineArgs& args) const { return combine_(&args); }

 private:
  void* symbol(const char* name) const;

  std::string path_;
  void* handle_;
  const DeepEpVariantInfo* info_;
  decltype(&deepep_last_error) last_error_;
  decltype(&deepep_layout) layout_;
  decltype(&deepep_notify) notify_;
  decltype(&deepep_dispatch) dispatch_;
  decltype(&deepep_combine) combine_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_LIBRARY_H_
