// A libcuda.so.1 whose device memory is the host's: as much of the driver API as kernels/runtime
// calls. Tests steer it through the functions fake_*; what it gives out is never a real GPU's.
#include <sys/mman.h>
#include <unistd.h>

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

// Memory with a fabric handle: a file, which mappings and the handles of the process keep.
struct Fabric {
  int file;
  int references;  // of the process; 0: only mappings are left
};
std::map<uint64_t, Fabric> fabrics;               // by number
std::map<uint64_t, std::pair<size_t, uint64_t>> mappings;  // base -> bytes, number
int fabric_supported = 1, fabric_create_result = 0, reservations;
constexpr size_t kGranularity = 2 << 20;

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
FAKE void fake_fabric(int supported, int create_result) {
  fabric_supported = supported;
  fabric_create_result = create_result;
}
// What of fabric memory is still held: handles, mappings and reserved addresses.
FAKE int fake_fabric_held(void) {
  int held = reservations + static_cast<int>(mappings.size());
  for (const auto& [number, fabric] : fabrics) held += fabric.references;
  return held;
}

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
FAKE int cuCtxGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}
FAKE int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 128 ? fabric_supported : 132;
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

// ---- Fabric memory

FAKE int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = kGranularity;
  return kSuccess;
}
FAKE int cuMemCreate(unsigned long long* handle, size_t bytes, const int* properties,
                     unsigned long long) {
  const bool fits = properties[0] == 1 && properties[1] == 8 && properties[2] == 1;
  if (!fits || bytes % kGranularity != 0) return kInvalidValue;
  if (fabric_create_result != 0) return fabric_create_result;
  const int file = memfd_create("fake", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kInvalidValue;
  *handle = next_id++;
  fabrics[*handle] = {file, 1};
  return kSuccess;
}
FAKE int cuMemRelease(unsigned long long handle) {
  --fabrics[handle].references;
  return kSuccess;
}
FAKE int cuMemAddressReserve(uint64_t* base, size_t bytes, size_t, uint64_t, unsigned long long) {
  void* made = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return kInvalidValue;
  *base = reinterpret_cast<uint64_t>(made);
  ++reservations;
  return kSuccess;
}
FAKE int cuMemAddressFree(uint64_t base, size_t bytes) {
  --reservations;
  return munmap(reinterpret_cast<void*>(base), bytes) == 0 ? kSuccess : kInvalidValue;
}
FAKE int cuMemMap(uint64_t base, size_t bytes, size_t, unsigned long long handle,
                  unsigned long long) {
  void* made = mmap(reinterpret_cast<void*>(base), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                    fabrics[handle].file, 0);
  if (made == MAP_FAILED) return kInvalidValue;
  mappings[base] = {bytes, handle};
  return kSuccess;
}
FAKE int cuMemSetAccess(uint64_t base, size_t bytes, const int* access, size_t count) {
  if (count != 1 || access[0] != 1 || access[2] != 3) return kInvalidValue;
  const int failed = mprotect(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE);
  return failed == 0 ? kSuccess : kInvalidValue;
}
FAKE int cuMemUnmap(uint64_t base, size_t bytes) {
  if (mappings[base].first != bytes) return kInvalidValue;
  mappings.erase(base);
  return kSuccess;
}
FAKE int cuMemRetainAllocationHandle(unsigned long long* handle, void* base) {
  const auto found = mappings.find(reinterpret_cast<uint64_t>(base));
  if (found == mappings.end()) return kInvalidValue;
  *handle = found->second.second;
  ++fabrics[*handle].references;
  return kSuccess;
}
FAKE int cuMemExportToShareableHandle(void* shareable, unsigned long long handle, int type,
                                      unsigned long long) {
  if (type != 8) return kInvalidValue;
  std::memcpy(shareable, &handle, sizeof(handle));
  return kSuccess;
}
FAKE int cuMemImportFromShareableHandle(unsigned long long* handle, const void* shareable,
                                        int type) {
  if (type != 8) return kInvalidValue;
  std::memcpy(handle, shareable, sizeof(*handle));
  ++fabrics[*handle].references;
  return kSuccess;
}
