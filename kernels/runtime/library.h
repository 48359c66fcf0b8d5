// A kernel library, loaded and checked.
#ifndef KERNELS_RUNTIME_LIBRARY_H_
#define KERNELS_RUNTIME_LIBRARY_H_

#include <string>

#include "kernels/abi/deepep_internode.h"
#include "kernels/abi/deepep_lowlatency.h"

namespace deepep {

// Loads a shared library for good, so that others which need it by its name find it. Throws
// std::runtime_error.
void preload(const std::string& path);

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

  // A topology has some of these. Calling one that it lacks throws std::runtime_error.
  int32_t layout(const DeepEpLayoutArgs& args) const { return have(layout_)(&args); }
  int32_t notify(const DeepEpNotifyArgs& args) const { return have(notify_)(&args); }
  int32_t dispatch(const DeepEpDispatchArgs& args) const { return have(dispatch_)(&args); }
  int32_t combine(const DeepEpCombineArgs& args) const { return have(combine_)(&args); }
  int32_t low_latency_dispatch(const DeepEpLowLatencyDispatchArgs& args) const {
    return have(low_latency_dispatch_)(&args);
  }
  int32_t low_latency_combine(const DeepEpLowLatencyCombineArgs& args) const {
    return have(low_latency_combine_)(&args);
  }
  int32_t internode_layout(const DeepEpInternodeLayoutArgs& args) const {
    return have(internode_layout_)(&args);
  }
  int32_t internode_notify(const DeepEpInternodeNotifyArgs& args) const {
    return have(internode_notify_)(&args);
  }
  int32_t internode_dispatch(const DeepEpInternodeDispatchArgs& args) const {
    return have(internode_dispatch_)(&args);
  }
  int32_t internode_combine(const DeepEpInternodeCombineArgs& args) const {
    return have(internode_combine_)(&args);
  }

  // Bringing the network up, of a GPU library across nodes; see deepep_internode.h. Each throws
  // std::runtime_error with the library's words.
  std::string network_make_id() const;
  void network_join(const std::string& id, int rank, int num_ranks) const;
  void* network_allocate(uint64_t bytes) const;

 private:
  void check(int32_t status) const;
  void* symbol(const char* name) const;  // throws when there is none
  template <class Function>
  void find(const char* name, Function* function) const;  // null when there is none
  template <class Function>
  Function have(Function function) const {
    if (function == nullptr) refuse();
    return function;
  }
  [[noreturn]] void refuse() const;

  std::string path_;
  void* handle_;
  const DeepEpVariantInfo* info_;
  decltype(&deepep_last_error) last_error_;
  decltype(&deepep_layout) layout_;
  decltype(&deepep_notify) notify_;
  decltype(&deepep_dispatch) dispatch_;
  decltype(&deepep_combine) combine_;
  decltype(&deepep_low_latency_dispatch) low_latency_dispatch_;
  decltype(&deepep_low_latency_combine) low_latency_combine_;
  decltype(&deepep_internode_layout) internode_layout_;
  decltype(&deepep_internode_notify) internode_notify_;
  decltype(&deepep_internode_dispatch) internode_dispatch_;
  decltype(&deepep_internode_combine) internode_combine_;
  decltype(&deepep_network_id_bytes) network_id_bytes_;
  decltype(&deepep_network_make_id) network_make_id_;
  decltype(&deepep_network_join) network_join_;
  decltype(&deepep_network_allocate) network_allocate_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_LIBRARY_H_
