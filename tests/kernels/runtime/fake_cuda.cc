// A libcuda.so.1 whose device memory is the host's: as much of the driver API as kernels/runtime
// calls. Tests steer it through the functions fake_*; what it gives out is never a real GPU's.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace {

struct Allocation {
  size_t bytes;
  uint64_t id;
};
std::mutex mutex;
std::map<uint64_t, Allocation> allocations;  // by base
uint64_t next_id = 1;
int context, exports_made, exports_fail;

constexpr int kSuccess = 0, kInvalidValue = 1;

void add(uint64_t base, size_t bytes) { allocations[base] = {bytes, next_id++}; }

const std::pair<const uint64_t, Allocation>* find(uint64_t at) {
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) return nullptr;
  const auto& found = *std::prev(next);
  return at < found.first + found.second.bytes ? &found : nullptr;
}

}  // namespace

// ---- For tests

// Says that an allocation lies there; whatever overlapped it is gone.
FAKE void fake_allocate(uint64_t base, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto at = allocations.begin(); at != allocations.end();) {
    const bool overlaps = at->first < base + bytes && base < at->first + at->second.bytes;
    at = overlaps ? allocations.erase(at) : std::next(at);
  }
  add(base, bytes);
}
FAKE void fake_free(uint64_t base) {
  std::lock_guard<std::mutex> lock(mutex);
  allocations.erase(base);
}
FAKE int fake_exports_made(void) { return exports_made; }
FAKE void fake_exports_fail(int result) { exports_fail = result; }

// ---- The driver

FAKE int cuInit(unsigned) { return kSuccess; }
FAKE int cuGetErrorString(int, const char** text) {
  *text = "a made up error";
  return kSuccess;
}
FAKE int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
FAKE int cuDeviceGetUuid(char* uuid, int device) {
  std::memset(uuid, device, 16);
  return kSuccess;
}
FAKE int cuDeviceGetAttribute(int* value, int, int) {
  *value = 132;
  return kSuccess;
}
FAKE int cuDevicePrimaryCtxRetain(void** made, int) {
  *made = &context;
  return kSuccess;
}
FAKE int cuCtxSetCurrent(void*) { return kSuccess; }
FAKE int cuCtxGetCurrent(void** current) {
  *current = &context;
  return kSuccess;
}
FAKE int cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
FAKE int cuStreamCreate(void** stream, unsigned) {
  *stream = &context;
  return kSuccess;
}
FAKE int cuStreamSynchronize(void*) { return kSuccess; }

FAKE int cuMemAlloc_v2(uint64_t* at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  *at = reinterpret_cast<uint64_t>(std::malloc(bytes));
  add(*at, bytes);
  return kSuccess;
}
FAKE int cuMemFree_v2(uint64_t at) {
  fake_free(at);
  std::free(reinterpret_cast<void*>(at));
  return kSuccess;
}
FAKE int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
  *at = std::malloc(bytes);
  return kSuccess;
}
FAKE int cuMemFreeHost(void* at) {
  std::free(at);
  return kSuccess;
}
FAKE int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(at), value, bytes);
  return kSuccess;
}
FAKE int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return kSuccess;
}
FAKE int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t at) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* found = find(at);
  if (found == nullptr) return kInvalidValue;
  *base = found->first;
  *bytes = found->second.bytes;
  return kSuccess;
}
// Only the number of an allocation (CU_POINTER_ATTRIBUTE_BUFFER_ID) is known here.
FAKE int cuPointerGetAttribute(void* value, int attribute, uint64_t at) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* found = find(at);
  if (found == nullptr || attribute != 7) return kInvalidValue;
  std::memcpy(value, &found->second.id, sizeof(found->second.id));
  return kSuccess;
}
FAKE int cuIpcGetMemHandle(char* handle, uint64_t base) {
  if (exports_fail != 0) return exports_fail;
  ++exports_made;
  std::memcpy(handle, &base, sizeof(base));
  return kSuccess;
}
