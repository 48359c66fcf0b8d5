// Host memory as anonymous files, opened by peers through /proc; device memory through CUDA IPC.
#include "kernels/runtime/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "kernels/runtime/out_of_memory.h"

namespace deepep {
namespace {

std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

// Objects of this process by address, so that ranks which are threads share them.
std::mutex registry_mutex;
std::map<uint64_t, std::weak_ptr<Memory>>& registry() {
  static auto* memories = new std::map<uint64_t, std::weak_ptr<Memory>>;
  return *memories;
}

char* map_file(int fd, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

class HostMemory : public Memory {
 public:
  HostMemory(char* data, size_t bytes, int fd) : Memory(data, bytes), fd_(fd) {}
  ~HostMemory() override {
    if (fd_ >= 0) {
      std::lock_guard<std::mutex> lock(registry_mutex);
      registry().erase(reinterpret_cast<uint64_t>(data()));
    }
    munmap(data(), bytes());
    if (fd_ >= 0) close(fd_);
  }
  MemoryHandle handle() const override;

 private:
  int fd_;  // -1 in a peer
};

class DeviceMemory : public Memory {
 public:
  enum class Kind { kOwned, kAdopted, kOpened };
  DeviceMemory(cuda::DevicePtr base, size_t bytes, Kind kind)
      : Memory(reinterpret_cast<char*>(base), bytes), kind_(kind) {}
  ~DeviceMemory() override {
    if (kind_ == Kind::kOwned) cuda::release(base());
    if (kind_ == Kind::kOpened) cuda::close_memory(base());
  }
  MemoryHandle handle() const override;

 private:
  cuda::DevicePtr base() const { return reinterpret_cast<cuda::DevicePtr>(data()); }
  Kind kind_;
};

class FabricMemory : public Memory {
 public:
  FabricMemory(const cuda::Mapped& mapped, size_t bytes)
      : Memory(reinterpret_cast<char*>(mapped.base), bytes), mapped_(mapped) {}
  ~FabricMemory() override { cuda::unmap(mapped_); }
  MemoryHandle handle() const override;

 private:
  cuda::Mapped mapped_;
};

}  // namespace

uint64_t process_id() {
  static std::mutex mutex;
  static pid_t pid = 0;
  static uint64_t id = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (pid != getpid()) {
    if (getrandom(&id, sizeof(id), 0) != sizeof(id)) throw system_error("getrandom");
    pid = getpid();
  }
  return id;
}

namespace {

std::shared_ptr<Memory> create_host(size_t bytes) {
  const std::string size = std::to_string(bytes) + " bytes";
  const int fd = memfd_create("deepep", MFD_CLOEXEC);
  if (fd < 0) throw system_error("cannot make shared memory of " + size);
  char* data = nullptr;
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0) data = map_file(fd, bytes);
  if (data == nullptr) {
    const OutOfMemory error("cannot map shared memory of " + size + ": " + std::strerror(errno));
    close(fd);
    throw error;
  }
  auto memory = std::make_shared<HostMemory>(data, bytes, fd);
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry()[reinterpret_cast<uint64_t>(data)] = memory;
  return memory;
}

std::shared_ptr<Memory> own_host_memory(uint64_t address) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(address);
  std::shared_ptr<Memory> memory = found == registry().end() ? nullptr : found->second.lock();
  if (memory == nullptr) throw std::runtime_error("a rank of this process has closed its memory");
  return memory;
}

std::shared_ptr<Memory> open_host(const MemoryHandle& handle) {
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    throw system_error(
        "cannot open the shared memory of process " + std::to_string(handle.pid) + " (" + path +
        "); ranks of one machine must run as one user and see each other's processes (containers: "
        "share the PID namespace)");
  }
  struct stat status{};
  char* data = nullptr;
  if (fstat(fd, &status) == 0 && status.st_ino == handle.inode) data = map_file(fd, handle.bytes);
  close(fd);
  if (data == nullptr) {
    throw std::runtime_error(path +
                             " is not the memory that its rank described; do the ranks run in "
                             "containers with PID namespaces of their own?");
  }
  return std::make_shared<HostMemory>(data, handle.bytes, -1);
}

}  // namespace

std::shared_ptr<Memory> Memory::create(Space space, size_t bytes) {
  if (space == Space::kHost) return create_host(bytes);
  if (space == Space::kFabric) {
    return std::make_shared<FabricMemory>(cuda::allocate_fabric(bytes), bytes);
  }
  return std::make_shared<DeviceMemory>(cuda::allocate(bytes), bytes, DeviceMemory::Kind::kOwned);
}

std::shared_ptr<Memory> Memory::adopt(cuda::DevicePtr base, size_t bytes) {
  return std::make_shared<DeviceMemory>(base, bytes, DeviceMemory::Kind::kAdopted);
}

std::shared_ptr<Memory> Memory::open(const MemoryHandle& handle) {
  const bool same_process = handle.process == process_id();
  if (handle.space == Space::kHost) {
    return same_process ? own_host_memory(handle.address) : open_host(handle);
  }
  // A process cannot open its own export; ranks that are its threads use the address itself.
  if (same_process) return adopt(handle.address, handle.bytes);
  const cuda::RelaxCapture relaxed;
  if (handle.space == Space::kFabric) {
    return std::make_shared<FabricMemory>(cuda::open_fabric(handle.fabric, handle.bytes),
                                          handle.bytes);
  }
  return std::make_shared<DeviceMemory>(cuda::open_memory(handle.ipc), handle.bytes,
                                        DeviceMemory::Kind::kOpened);
}

namespace {

MemoryHandle describe(const Memory& memory, Space space) {
  MemoryHandle handle{};
  handle.process = process_id();
  handle.address = reinterpret_cast<uint64_t>(memory.data());
  handle.bytes = memory.bytes();
  handle.space = space;
  return handle;
}

MemoryHandle HostMemory::handle() const {
  struct stat status{};
  if (fstat(fd_, &status) != 0) throw system_error("cannot describe shared memory");
  MemoryHandle handle = describe(*this, Space::kHost);
  handle.inode = status.st_ino;
  handle.pid = getpid();
  handle.fd = fd_;
  return handle;
}

MemoryHandle DeviceMemory::handle() const {
  MemoryHandle handle = describe(*this, Space::kDevice);
  const cuda::RelaxCapture relaxed;
  handle.ipc = cuda::export_memory(base());
  return handle;
}

MemoryHandle FabricMemory::handle() const {
  MemoryHandle handle = describe(*this, Space::kFabric);
  const cuda::RelaxCapture relaxed;
  handle.fabric = cuda::export_fabric(mapped_.base);
  return handle;
}

}  // namespace

}  // namespace deepep
