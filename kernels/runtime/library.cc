// Loading and handshake.
#include "kernels/runtime/library.h"

#include <dlfcn.h>

#include <stdexcept>

#include "kernels/device/control.h"

namespace deepep {
namespace {

void expect(const std::string& path, const char* what, uint64_t library, uint64_t runtime) {
  if (library == runtime) return;
  throw std::runtime_error(path + " was built with " + what + " " + std::to_string(library) +
                           ", this runtime with " + std::to_string(runtime) +
                           "; build both from one revision");
}

}  // namespace

void preload(const std::string& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error(std::string("cannot load ") + dlerror());
  }
}

template <class Function>
void Library::find(const char* name, Function* function) const {
  *function = reinterpret_cast<Function>(dlsym(handle_, name));
}

Library::Library(const std::string& path) : path_(path) {
  handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) throw std::runtime_error(std::string("cannot load ") + dlerror());
  try {
    info_ = reinterpret_cast<decltype(&deepep_variant)>(symbol("deepep_variant"))();
    expect(path, "ABI version", info_->abi_version, DEEPEP_ABI_VERSION);
    expect(path, "DeepEpVariantInfo of bytes", info_->struct_size, sizeof(DeepEpVariantInfo));
    expect(path, "DeepEpContext of bytes", info_->context_size, sizeof(DeepEpContext));
    expect(path, "DeepEpLayoutArgs of bytes", info_->layout_args_size, sizeof(DeepEpLayoutArgs));
    expect(path, "DeepEpNotifyArgs of bytes", info_->notify_args_size, sizeof(DeepEpNotifyArgs));
    expect(path, "DeepEpDispatchArgs of bytes", info_->dispatch_args_size,
           sizeof(DeepEpDispatchArgs));
    expect(path, "DeepEpCombineArgs of bytes", info_->combine_args_size, sizeof(DeepEpCombineArgs));
    expect(path, "DeepEpLowLatencyDispatchArgs of bytes", info_->low_latency_dispatch_args_size,
           sizeof(DeepEpLowLatencyDispatchArgs));
    expect(path, "DeepEpLowLatencyCombineArgs of bytes", info_->low_latency_combine_args_size,
           sizeof(DeepEpLowLatencyCombineArgs));
    expect(path, "DeepEpInternodeLayoutArgs of bytes", info_->internode_layout_args_size,
           sizeof(DeepEpInternodeLayoutArgs));
    expect(path, "DeepEpInternodeNotifyArgs of bytes", info_->internode_notify_args_size,
           sizeof(DeepEpInternodeNotifyArgs));
    expect(path, "DeepEpInternodeDispatchArgs of bytes", info_->internode_dispatch_args_size,
           sizeof(DeepEpInternodeDispatchArgs));
    expect(path, "DeepEpInternodeCombineArgs of bytes", info_->internode_combine_args_size,
           sizeof(DeepEpInternodeCombineArgs));
    expect(path, "DeepEpNetwork of bytes", info_->network_size, sizeof(DeepEpNetwork));
    expect(path, "a control block of bytes", info_->control_bytes, sizeof(Control));
    last_error_ = reinterpret_cast<decltype(last_error_)>(symbol("deepep_last_error"));
    find("deepep_layout", &layout_);
    find("deepep_notify", &notify_);
    find("deepep_dispatch", &dispatch_);
    find("deepep_combine", &combine_);
    find("deepep_internode_layout", &internode_layout_);
    find("deepep_internode_notify", &internode_notify_);
    find("deepep_internode_dispatch", &internode_dispatch_);
    find("deepep_internode_combine", &internode_combine_);
    find("deepep_network_id_bytes", &network_id_bytes_);
    find("deepep_network_make_id", &network_make_id_);
    find("deepep_network_join", &network_join_);
    find("deepep_network_allocate", &network_allocate_);
    find("deepep_low_latency_dispatch", &low_latency_dispatch_);
    find("deepep_low_latency_combine", &low_latency_combine_);
  } catch (...) {
    dlclose(handle_);
    throw;
  }
}

Library::~Library() { dlclose(handle_); }

void* Library::symbol(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr) {
    throw std::runtime_error(path_ + " has no function " + name + ": it is not a deepep library");
  }
  return found;
}

void Library::check(int32_t status) const {
  if (status != DEEPEP_OK) throw std::runtime_error(path_ + ": " + last_error());
}

std::string Library::network_make_id() const {
  std::string id(static_cast<size_t>(have(network_id_bytes_)()), '\0');
  check(network_make_id_(id.data()));
  return id;
}

void Library::network_join(const std::string& id, int rank, int num_ranks) const {
  const auto bytes = static_cast<size_t>(have(network_id_bytes_)());
  if (id.size() != bytes) throw std::invalid_argument("the network's id has another size");
  check(network_join_(id.data(), rank, num_ranks));
}

void* Library::network_allocate(uint64_t bytes) const {
  void* memory = nullptr;
  check(have(network_allocate_)(bytes, &memory));
  return memory;
}

void Library::refuse() const {
  throw std::runtime_error(path_ + " is of topology " + info_->topology +
                           ", which has no such operation");
}

}  // namespace deepep
