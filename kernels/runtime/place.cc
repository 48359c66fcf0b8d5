// The two places.
#include "kernels/runtime/place.h"

#include <cstring>

namespace deepep {
namespace {

class HostPlace : public Place {
 public:
  explicit HostPlace(int num_ranks)
      : control_(num_ranks),
        workspaces_(num_ranks),
        segments_(static_cast<size_t>(num_ranks) * DEEPEP_MAX_SEGMENTS) {}

  Space space() const override { return Space::kHost; }
  Mailbox* mailbox() override { return &mailbox_; }
  void* const* control_table() const override { return control_.data(); }
  void* const* workspace_table() const override { return workspaces_.data(); }
  void* const* segment_table() const override { return segments_.data(); }
  void set_control(int rank, void* base) override { control_[rank] = base; }
  void set_workspace(int rank, void* base) override { workspaces_[rank] = base; }
  void set_segment(int index, void* base) override { segments_[index] = base; }
  void read_ops(const Control* control, OpState* ops) const override {
    std::memcpy(ops, control->ops, sizeof(control->ops));
  }
  void write_ops(Control* control, const OpState* ops) override {
    std::memcpy(control->ops, ops, sizeof(control->ops));
  }

 private:
  Mailbox mailbox_{};
  std::vector<void*> control_, workspaces_, segments_;
};

// The segment table is host memory that kernels reach and read once: it changes while kernels run,
// and a copy to the device could wait behind the very kernel that waits for a peer's answer to it,
// since the streams of a process share a few hardware queues. The control table is written once.
class DevicePlace : public Place {
 public:
  DevicePlace(int device, int num_ranks, Space space) : device_(device), space_(space) {
    cuda::use_device(device);
    const size_t words = static_cast<size_t>(num_ranks) * DEEPEP_MAX_SEGMENTS;
    control_ = cuda::allocate(sizeof(void*) * num_ranks);
    workspaces_ = cuda::allocate(sizeof(void*) * num_ranks);
    cache_ = cuda::allocate(sizeof(void*) * words);
    segments_ = static_cast<void**>(cuda::allocate_mapped(sizeof(void*) * words));
    mailbox_ = static_cast<Mailbox*>(cuda::allocate_mapped(sizeof(Mailbox)));
  }
  ~DevicePlace() override {
    cuda::release(control_);
    cuda::release(workspaces_);
    cuda::release(cache_);
    cuda::release_mapped(segments_);
    cuda::release_mapped(mailbox_);
  }

  Space space() const override { return space_; }
  int device() const override { return device_; }
  void enter_thread() const override { cuda::use_device(device_); }
  Mailbox* mailbox() override { return mailbox_; }
  void* const* control_table() const override { return reinterpret_cast<void* const*>(control_); }
  void* const* workspace_table() const override {
    return reinterpret_cast<void* const*>(workspaces_);
  }
  void* const* segment_table() const override { return segments_; }
  void** segment_cache() const override { return reinterpret_cast<void**>(cache_); }
  void set_control(int rank, void* base) override {
    cuda::write(control_ + sizeof(void*) * rank, &base, sizeof(base));
  }
  void set_workspace(int rank, void* base) override {
    cuda::write(workspaces_ + sizeof(void*) * rank, &base, sizeof(base));
  }
  void set_segment(int index, void* base) override { segments_[index] = base; }
  void read_ops(const Control* control, OpState* ops) const override {
    cuda::read(ops, reinterpret_cast<cuda::DevicePtr>(control->ops), sizeof(control->ops));
  }
  void write_ops(Control* control, const OpState* ops) override {
    cuda::write(reinterpret_cast<cuda::DevicePtr>(control->ops), ops, sizeof(control->ops));
  }

 private:
  int device_;
  Space space_;
  cuda::DevicePtr control_, workspaces_, cache_;
  void** segments_;
  Mailbox* mailbox_;
};

}  // namespace

std::unique_ptr<Place> Place::make(int device, int num_ranks, bool fabric) {
  if (device < 0) return std::make_unique<HostPlace>(num_ranks);
  return std::make_unique<DevicePlace>(device, num_ranks, fabric ? Space::kFabric : Space::kDevice);
}

}  // namespace deepep
