// Device memory that is exported by fabric handle, over a made up driver: what peers see of it,
// what is left of it, and the words where there is none.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/runtime/domain.h"
#include "kernels/runtime/memory.h"

namespace {

using deepep::Memory;
using deepep::MemoryHandle;
using deepep::Space;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

template <class Signature>
Signature* fake(const char* name) {
  void* found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  expect(found != nullptr, "the driver is the made up one; set LD_LIBRARY_PATH to its folder");
  return reinterpret_cast<Signature*>(found);
}

int held() { return fake<int()>("fake_fabric_held")(); }
void allow(int supported, int create_result) {
  fake<void(int, int)>("fake_fabric")(supported, create_result);
}

// The handle as a process gets it that is not the owner's.
MemoryHandle from_elsewhere(const Memory& memory) {
  MemoryHandle handle = memory.handle();
  handle.process ^= 1;
  return handle;
}

void a_peer_sees_the_same_memory_at_another_address() {
  const auto mine = Memory::create(Space::kFabric, 3 << 20);
  expect(mine->bytes() == 3 << 20, "as many bytes as were asked for");
  expect(mine->data()[0] == 0 && mine->data()[(3 << 20) - 1] == 0, "zeros at first");
  const auto theirs = Memory::open(from_elsewhere(*mine));
  expect(theirs->data() != mine->data(), "mapped anew");
  std::strcpy(mine->data() + 12345, "hello");
  expect(std::strcmp(theirs->data() + 12345, "hello") == 0, "the same bytes");
  expect(theirs->bytes() == mine->bytes(), "all of them");
}

void ranks_of_one_process_use_the_address_itself() {
  const auto mine = Memory::create(Space::kFabric, 100);
  expect(Memory::open(mine->handle())->data() == mine->data(), "a thread's memory is everybody's");
}

void nothing_is_left_and_a_peer_may_outlive_the_owner() {
  const int before = held();
  auto mine = Memory::create(Space::kFabric, 100);
  auto theirs = Memory::open(from_elsewhere(*mine));
  std::strcpy(mine->data(), "still there");
  mine.reset();
  expect(std::strcmp(theirs->data(), "still there") == 0, "the mapping keeps the memory");
  theirs.reset();
  expect(held() == before, "no handle, mapping or address is left");
}

std::string refusal() {
  const int before = held();
  try {
    deepep::Domain domain(0, 1, 0, true);
  } catch (const std::runtime_error& error) {
    expect(held() == before, "a refusal leaves nothing");
    return error.what();
  }
  expect(false, "it is refused");
  return "";
}

void where_there_is_no_fabric_the_text_says_what_to_do() {
  allow(0, 0);
  std::string text = refusal();
  expect(text.find("attribute 128 is 0") != std::string::npos, "what the device says");
  expect(text.find("IMEX") != std::string::npos, "what it needs");
  expect(text.find("Leave use_fabric out") != std::string::npos, "the cure");
  allow(1, 800);  // CUDA_ERROR_NOT_PERMITTED: no channel
  text = refusal();
  expect(text.find("(800)") != std::string::npos, "what the driver says");
  expect(text.find("nvidia-caps-imex-channels") != std::string::npos, "what it needs");
  allow(1, 0);
}

void too_little_memory_is_told_from_other_failures() {
  allow(1, 2);
  try {
    Memory::create(Space::kFabric, 3 << 20);
    expect(false, "it is refused");
  } catch (const std::bad_alloc& error) {
    expect(std::string(error.what()).find("4194304 bytes") != std::string::npos, "how much");
  }
  allow(1, 0);
}

void a_domain_gives_such_memory_to_tensors() {
  const int before = held();
  {
    deepep::Domain domain(0, 1, 0, true);
    domain.connect({domain.describe()});
    const auto piece = domain.pool()->allocate(1000);
    expect(domain.locate(piece.data, 1000) != DEEPEP_NO_LOCATOR, "it has a place");
    std::memset(piece.data, 1, 1000);
    domain.pool()->release(piece);
  }
  expect(held() == before, "nothing is left of the domain");
}

}  // namespace

int main() {
  a_peer_sees_the_same_memory_at_another_address();
  ranks_of_one_process_use_the_address_itself();
  nothing_is_left_and_a_peer_may_outlive_the_owner();
  where_there_is_no_fabric_the_text_says_what_to_do();
  too_little_memory_is_told_from_other_failures();
  a_domain_gives_such_memory_to_tensors();
  std::puts("6 tests passed");
  return 0;
}
