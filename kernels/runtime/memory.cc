// Shared memory as anonymous files, opened by peers through /proc.
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

std::shared_ptr<Memory> Memory::create(size_t bytes) {
  const int fd = memfd_create("deepep", MFD_CLOEXEC);
  if (fd < 0)
    throw system_error("cannot make shared memory of " + std::to_string(bytes) + " bytes");
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const auto error =
        system_error("cannot size shared memory to " + std::to_string(bytes) + " bytes");
    close(fd);
    throw error;
  }
  char* data = map_file(fd, bytes);
  if (data == nullptr) {
    const auto error =
        system_error("cannot map " + std::to_string(bytes) + " bytes of shared memory");
    close(fd);
    throw error;
  }
  std::shared_ptr<Memory> memory(new Memory(data, bytes, fd));
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry()[reinterpret_cast<uint64_t>(data)] = memory;
  return memory;
}

std::shared_ptr<Memory> Memory::open(const MemoryHandle& handle) {
  if (handle.process == process_id()) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const auto found = registry().find(handle.address);
    std::shared_ptr<Memory> memory = found == registry().end() ? nullptr : found->second.lock();
    if (memory == nullptr) throw std::runtime_error("a rank of this process has closed its memory");
    return memory;
  }
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
  return std::shared_ptr<Memory>(new Memory(data, handle.bytes, -1));
}

Memory::~Memory() {
  if (fd_ >= 0) {
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry().erase(reinterpret_cast<uint64_t>(data_));
  }
  munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

MemoryHandle Memory::handle() const {
  struct stat status{};
  if (fstat(fd_, &status) != 0) throw system_error("cannot describe shared memory");
  MemoryHandle handle{};
  handle.process = process_id();
  handle.address = reinterpret_cast<uint64_t>(data_);
  handle.bytes = bytes_;
  handle.inode = status.st_ino;
  handle.pid = getpid();
  handle.fd = fd_;
  return handle;
}

}  // namespace deepep
