// The CUDA driver's functions that the runtime needs, loaded when first asked for: the module works
// without a driver, and is built without CUDA's headers. Names and meanings are the driver API's.
#ifndef KERNELS_RUNTIME_CUDA_DRIVER_H_
#define KERNELS_RUNTIME_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace deepep::cuda {

using DevicePtr = uint64_t;

struct IpcHandle {
  char bytes[64];
};

// Whether libcuda.so.1 can be loaded; the other functions throw std::runtime_error if not.
bool available();

// Makes the device's primary context, which torch uses too, current on this thread.
void use_device(int device);
// While it lives, this thread may make calls that a stream capture of another thread would forbid;
// they concern memory, not the captured work.
class RelaxCapture {
 public:
  RelaxCapture();
  ~RelaxCapture();

 private:
  int mode_;
};

std::string device_uuid(int device);
int num_multiprocessors(int device);

DevicePtr allocate(size_t bytes);  // zeroed
void release(DevicePtr ptr);
// Page-locked memory that kernels can reach by the same address; zeroed.
void* allocate_mapped(size_t bytes);
void release_mapped(void* ptr);

// Copies that are complete on return, on a stream that waits for no other.
void write(DevicePtr to, const void* from, size_t bytes);
void read(void* to, DevicePtr from, size_t bytes);

// The allocation that a pointer lies in, and a number that no other allocation ever has.
struct Range {
  DevicePtr base;
  size_t bytes;
  uint64_t id;
};
Range range_of(DevicePtr ptr);
// The number alone, in half the time; 0 where nothing is allocated any more.
uint64_t allocation_id(DevicePtr ptr);

// ---- Memory that can also be exported by fabric handle, which reaches all of an NVLink domain

struct FabricHandle {
  char bytes[64];
};
// A mapping of it here. The memory itself goes when nobody has it mapped any more.
struct Mapped {
  DevicePtr base;
  size_t bytes;  // at least those asked for
};
// Zeroed. Throws std::runtime_error with the cause and the cure where the device, or the machine's
// IMEX service, does not allow it.
Mapped allocate_fabric(size_t bytes);
FabricHandle export_fabric(DevicePtr base);
// A peer's; as many bytes as were asked for when it was allocated.
Mapped open_fabric(const FabricHandle& handle, size_t bytes);
void unmap(const Mapped& mapped);

// ---- CUDA IPC, for memory of any allocator

IpcHandle export_memory(DevicePtr base);
DevicePtr open_memory(const IpcHandle& handle);
void close_memory(DevicePtr base);

}  // namespace deepep::cuda

#endif  // KERNELS_RUNTIME_CUDA_DRIVER_H_
