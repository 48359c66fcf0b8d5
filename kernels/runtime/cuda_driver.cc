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

void check(Result result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  function<Result(Result, const char**)>("cuGetErrorString")(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text == nullptr ? "error" : text) + " (" +
                           std::to_string(result) + ")");
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

int device_number(int ordinal) {
  static const Result started = function<Result(unsigned)>("cuInit")(0);
  check(started, "cuInit");
  int device = 0;
  check(function<Result(int*, int)>("cuDeviceGet")(&device, ordinal), "cuDeviceGet");
  return device;
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
  const Stream stream = copy_stream();
  check(function<Result(DevicePtr, unsigned char, size_t, Stream)>("cuMemsetD8Async")(ptr, 0, bytes,
                                                                                      stream),
        "cuMemsetD8Async");
  finish(stream);
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
