// libcuda.so.1 by name. Constants are those of the driver API's public headers.
#include "kernels/runtime/cuda_driver.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "kernels/runtime/out_of_memory.h"

namespace deepep::cuda {
namespace {

using Result = int;
using Stream = void*;
constexpr unsigned kHostAllocDeviceMap = 2;     // CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kHostAllocPortable = 1;      // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kIpcLazyPeerAccess = 1;      // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr unsigned kStreamNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
constexpr int kCaptureRelaxed = 2;              // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr Result kErrorOutOfMemory = 2;         // CUDA_ERROR_OUT_OF_MEMORY
constexpr int kPointerBufferId = 7;             // CU_POINTER_ATTRIBUTE_BUFFER_ID
constexpr int kMultiprocessorCount = 16;        // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

constexpr int kFabricSupported = 128;  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
constexpr int kHandleFabric = 8;  // CU_MEM_HANDLE_TYPE_FABRIC

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of the public header.
struct Location {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int device = 0;
};
struct AllocationProperties {
  int type = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = kHandleFabric;
  Location location;
  void* unused = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  Location location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(Access) == 12, "as in the header");

void* library() {
  static void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return handle;
}

template <class Signature>
Signature* function(const char* name) {
  void* found = library() == nullptr ? nullptr : dlsym(library(), name);
  if (found == nullptr) {
    throw std::runtime_error(std::string(name) +
                             " is not there: no CUDA driver (libcuda.so.1) is installed, or it is "
                             "too old; use device='cpu', or install the driver");
  }
  return reinterpret_cast<Signature*>(found);
}

void check(Result result, const char* what, const char* cure = "") {
  if (result == 0) return;
  const char* text = nullptr;
  function<Result(Result, const char**)>("cuGetErrorString")(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text == nullptr ? "error" : text) + " (" +
                           std::to_string(result) + ")" + cure);
}

// A stream of its own for each context: the default stream would wait for kernels that wait for
// peers.
Stream copy_stream() {
  static std::mutex mutex;
  static auto* streams = new std::map<void*, Stream>;
  void* context = nullptr;
  check(function<Result(void**)>("cuCtxGetCurrent")(&context), "cuCtxGetCurrent");
  std::lock_guard<std::mutex> lock(mutex);
  Stream& stream = (*streams)[context];
  if (stream == nullptr) {
    check(function<Result(Stream*, unsigned)>("cuStreamCreate")(&stream, kStreamNonBlocking),
          "cuStreamCreate");
  }
  return stream;
}
void finish(Stream stream) {
  check(function<Result(Stream)>("cuStreamSynchronize")(stream), "cuStreamSynchronize");
}

void clear(DevicePtr ptr, size_t bytes) {
  const Stream stream = copy_stream();
  check(function<Result(DevicePtr, unsigned char, size_t, Stream)>("cuMemsetD8Async")(ptr, 0, bytes,
                                                                                      stream),
        "cuMemsetD8Async");
  finish(stream);
}

int device_number(int ordinal) {
  static const Result started = function<Result(unsigned)>("cuInit")(0);
  check(started, "cuInit");
  int device = 0;
  check(function<Result(int*, int)>("cuDeviceGet")(&device, ordinal), "cuDeviceGet");
  return device;
}

// ---- Parts of fabric memory

using Allocation = unsigned long long;  // CUmemGenericAllocationHandle

int current_device() {
  int device = 0;
  check(function<Result(int*)>("cuCtxGetDevice")(&device), "cuCtxGetDevice");
  return device;
}

AllocationProperties fabric_properties() {
  AllocationProperties properties;
  properties.location.device = current_device();
  return properties;
}

size_t round_to_granularity(size_t bytes) {
  const AllocationProperties properties = fabric_properties();
  size_t unit = 0;
  check(function<Result(size_t*, const AllocationProperties*, int)>(
            "cuMemGetAllocationGranularity")(&unit, &properties, 0),
        "cuMemGetAllocationGranularity");
  return (bytes + unit - 1) / unit * unit;
}

void release_allocation(Allocation allocation) {
  function<Result(Allocation)>("cuMemRelease")(allocation);
}

// The mapping keeps the memory, so `allocation` is released here, whatever happens.
Mapped map(Allocation allocation, size_t size) {
  DevicePtr base = 0;
  Result result = function<Result(DevicePtr*, size_t, size_t, DevicePtr, unsigned long long)>(
      "cuMemAddressReserve")(&base, size, 0, 0, 0);
  const char* what = "cuMemAddressReserve";
  if (result == 0) {
    what = "cuMemMap";
    result = function<Result(DevicePtr, size_t, size_t, Allocation, unsigned long long)>(
        "cuMemMap")(base, size, 0, allocation, 0);
    if (result == 0) {
      Access access;
      access.location.device = current_device();
      what = "cuMemSetAccess";
      result = function<Result(DevicePtr, size_t, const Access*, size_t)>("cuMemSetAccess")(
          base, size, &access, 1);
      if (result != 0) function<Result(DevicePtr, size_t)>("cuMemUnmap")(base, size);
    }
    if (result != 0) function<Result(DevicePtr, size_t)>("cuMemAddressFree")(base, size);
  }
  release_allocation(allocation);
  check(result, what);
  return {base, size};
}

}  // namespace

bool available() { return library() != nullptr; }

void use_device(int ordinal) {
  static std::mutex mutex;
  static auto* contexts = new std::map<int, void*>;
  std::lock_guard<std::mutex> lock(mutex);
  void*& context = (*contexts)[ordinal];
  if (context == nullptr) {
    check(
        function<Result(void**, int)>("cuDevicePrimaryCtxRetain")(&context, device_number(ordinal)),
        "cuDevicePrimaryCtxRetain");
  }
  check(function<Result(void*)>("cuCtxSetCurrent")(context), "cuCtxSetCurrent");
}

RelaxCapture::RelaxCapture() : mode_(kCaptureRelaxed) {
  check(function<Result(int*)>("cuThreadExchangeStreamCaptureMode")(&mode_),
        "cuThreadExchangeStreamCaptureMode");
}

RelaxCapture::~RelaxCapture() {
  function<Result(int*)>("cuThreadExchangeStreamCaptureMode")(&mode_);
}

std::string device_uuid(int ordinal) {
  char uuid[16];
  check(function<Result(char*, int)>("cuDeviceGetUuid")(uuid, device_number(ordinal)),
        "cuDeviceGetUuid");
  return std::string(uuid, sizeof(uuid));
}

int num_multiprocessors(int ordinal) {
  int count = 0;
  check(function<Result(int*, int, int)>("cuDeviceGetAttribute")(&count, kMultiprocessorCount,
                                                                 device_number(ordinal)),
        "cuDeviceGetAttribute");
  return count;
}

DevicePtr allocate(size_t bytes) {
  DevicePtr ptr = 0;
  const Result made = function<Result(DevicePtr*, size_t)>("cuMemAlloc_v2")(&ptr, bytes);
  if (made == kErrorOutOfMemory) {
    throw OutOfMemory("cuMemAlloc of " + std::to_string(bytes) + " bytes: out of memory");
  }
  check(made, "cuMemAlloc");
  clear(ptr, bytes);
  return ptr;
}

void release(DevicePtr ptr) {
  // At exit the driver may be gone already; then there is nothing left to free.
  function<Result(DevicePtr)>("cuMemFree_v2")(ptr);
}

void* allocate_mapped(size_t bytes) {
  void* ptr = nullptr;
  check(function<Result(void**, size_t, unsigned)>("cuMemHostAlloc")(
            &ptr, bytes, kHostAllocDeviceMap | kHostAllocPortable),
        "cuMemHostAlloc");
  std::memset(ptr, 0, bytes);
  return ptr;
}

void release_mapped(void* ptr) { function<Result(void*)>("cuMemFreeHost")(ptr); }

void write(DevicePtr to, const void* from, size_t bytes) {
  const Stream stream = copy_stream();
  check(function<Result(DevicePtr, const void*, size_t, Stream)>("cuMemcpyHtoDAsync_v2")(
            to, from, bytes, stream),
        "cuMemcpyHtoDAsync");
  finish(stream);
}

void read(void* to, DevicePtr from, size_t bytes) {
  const Stream stream = copy_stream();
  check(function<Result(void*, DevicePtr, size_t, Stream)>("cuMemcpyDtoHAsync_v2")(to, from, bytes,
                                                                                   stream),
        "cuMemcpyDtoHAsync");
  finish(stream);
}

Range range_of(DevicePtr ptr) {
  static auto* get_range =
      function<Result(DevicePtr*, size_t*, DevicePtr)>("cuMemGetAddressRange_v2");
  Range range{};
  check(get_range(&range.base, &range.bytes, ptr), "cuMemGetAddressRange");
  range.id = allocation_id(range.base);
  check(range.id == 0, "cuPointerGetAttribute");
  return range;
}

uint64_t allocation_id(DevicePtr ptr) {
  static auto* get_attribute = function<Result(void*, int, DevicePtr)>("cuPointerGetAttribute");
  unsigned long long id = 0;
  return get_attribute(&id, kPointerBufferId, ptr) == 0 ? id : 0;
}

Mapped allocate_fabric(size_t bytes) {
  const char* cure =
      "; it needs GPUs of one NVLink domain, a running IMEX service and a channel in "
      "/dev/nvidia-caps-imex-channels. Leave use_fabric out: inside one machine CUDA IPC reaches "
      "the same GPUs";
  int supported = 0;
  check(function<Result(int*, int, int)>("cuDeviceGetAttribute")(&supported, kFabricSupported,
                                                                 current_device()),
        "cuDeviceGetAttribute");
  if (supported == 0) {
    throw std::runtime_error("the device does not export memory by fabric handle (attribute " +
                             std::to_string(kFabricSupported) + " is 0)" + cure);
  }
  const size_t size = round_to_granularity(bytes);
  const AllocationProperties properties = fabric_properties();
  Allocation allocation = 0;
  const Result made =
      function<Result(Allocation*, size_t, const AllocationProperties*, unsigned long long)>(
          "cuMemCreate")(&allocation, size, &properties, 0);
  if (made == kErrorOutOfMemory) {
    throw OutOfMemory("cuMemCreate of " + std::to_string(size) + " bytes: out of memory");
  }
  check(made, "cuMemCreate of memory with a fabric handle", cure);
  const Mapped mapped = map(allocation, size);
  clear(mapped.base, size);
  return mapped;
}

FabricHandle export_fabric(DevicePtr base) {
  Allocation allocation = 0;
  check(function<Result(Allocation*, void*)>("cuMemRetainAllocationHandle")(
            &allocation, reinterpret_cast<void*>(base)),
        "cuMemRetainAllocationHandle");
  FabricHandle handle{};
  const Result result = function<Result(void*, Allocation, int, unsigned long long)>(
      "cuMemExportToShareableHandle")(&handle, allocation, kHandleFabric, 0);
  release_allocation(allocation);
  check(result, "cuMemExportToShareableHandle");
  return handle;
}

Mapped open_fabric(const FabricHandle& handle, size_t bytes) {
  FabricHandle copy = handle;
  Allocation allocation = 0;
  check(function<Result(Allocation*, void*, int)>("cuMemImportFromShareableHandle")(
            &allocation, &copy, kHandleFabric),
        "cuMemImportFromShareableHandle");
  return map(allocation, round_to_granularity(bytes));
}

void unmap(const Mapped& mapped) {
  function<Result(DevicePtr, size_t)>("cuMemUnmap")(mapped.base, mapped.bytes);
  function<Result(DevicePtr, size_t)>("cuMemAddressFree")(mapped.base, mapped.bytes);
}

IpcHandle export_memory(DevicePtr base) {
  IpcHandle handle{};
  check(function<Result(IpcHandle*, DevicePtr)>("cuIpcGetMemHandle")(&handle, base),
        "cuIpcGetMemHandle (memory made with expandable segments cannot be exported: unset "
        "expandable_segments in PYTORCH_CUDA_ALLOC_CONF)");
  return handle;
}

DevicePtr open_memory(const IpcHandle& handle) {
  DevicePtr ptr = 0;
  check(function<Result(DevicePtr*, IpcHandle, unsigned)>("cuIpcOpenMemHandle_v2")(
            &ptr, handle, kIpcLazyPeerAccess),
        "cuIpcOpenMemHandle");
  return ptr;
}

void close_memory(DevicePtr base) { function<Result(DevicePtr)>("cuIpcCloseMemHandle")(base); }

}  // namespace deepep::cuda
