// Exported device memory, over a made up driver: what a domain says of an address whose allocation
// was freed, grew, or gave its place to another.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/runtime/domain.h"

namespace {

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

constexpr uint64_t kBase = 0x7f0000000000;
constexpr size_t kBytes = 2 << 20;

struct World {
  deepep::Domain domain{0, 1, 0};
  void (*allocate)(uint64_t, size_t) = fake<void(uint64_t, size_t)>("fake_allocate");
  void (*release)(uint64_t) = fake<void(uint64_t)>("fake_free");

  World() {
    domain.connect({domain.describe()});
    allocate(kBase, kBytes);
  }
  ~World() { release(kBase); }

  void share(uint64_t at) { domain.export_allocation(reinterpret_cast<void*>(at)); }
  DeepEpLocator locate(uint64_t at, size_t bytes) {
    return domain.locate(reinterpret_cast<void*>(at), bytes);
  }
  bool knows(uint64_t at, size_t bytes) { return locate(at, bytes) != DEEPEP_NO_LOCATOR; }
};

uint64_t slot(DeepEpLocator at) { return at >> 48; }

void an_address_inside_an_export_has_a_locator() {
  World world;
  expect(!world.knows(kBase, 1), "nothing is exported yet");
  world.share(kBase + 4096);
  const DeepEpLocator at = world.locate(kBase + 8192, 100);
  expect((at & ((uint64_t{1} << 48) - 1)) == 8192, "the offset counts from the allocation's base");
  expect(world.knows(kBase, kBytes), "all of it is exported");
  expect(!world.knows(kBase + 1, kBytes), "what ends behind it is not");
  expect(!world.knows(kBase - 1, 1), "what begins before it is not");
}

void a_second_export_makes_nothing_new() {
  World world;
  world.share(kBase);
  const auto made = fake<int()>("fake_exports_made");
  const int before = made();
  const uint64_t first = slot(world.locate(kBase, 1));
  world.share(kBase + 77);
  expect(made() == before && slot(world.locate(kBase, 1)) == first, "one segment, one handle");
}

void an_allocation_that_took_the_place_of_a_freed_one_is_told_from_it() {
  World world;
  world.share(kBase);
  const uint64_t old = slot(world.locate(kBase, 1));
  world.allocate(kBase, kBytes);  // same address, same size
  expect(!world.knows(kBase + 10, 10), "peers have the freed one open, not this one");
  world.share(kBase);
  expect(world.knows(kBase + 10, 10) && slot(world.locate(kBase, 1)) != old, "a new segment");
}

void an_allocation_that_overlaps_a_freed_one_is_told_from_it() {
  for (const int64_t shift : {-4096, 4096}) {
    World world;
    world.share(kBase);
    world.allocate(kBase + shift, 2 * kBytes);
    expect(!world.knows(kBase + 8192, 10), "it is not the one that was exported");
    world.share(kBase + 8192);
    expect(world.knows(kBase + shift, 2 * kBytes), "now it is, from end to end");
    world.release(kBase + shift);
  }
}

void freed_memory_is_not_exported_and_cannot_be() {
  World world;
  world.share(kBase);
  world.release(kBase);
  expect(!world.knows(kBase, 10), "nothing is there");
  try {
    world.share(kBase);
    expect(false, "an export of nothing is refused");
  } catch (const std::runtime_error& error) {
    expect(std::string(error.what()).find("cuMemGetAddressRange") == 0, "the driver's words");
  }
}

void memory_that_the_driver_does_not_export_is_refused_with_the_cure() {
  World world;
  const auto fail = fake<void(int)>("fake_exports_fail");
  fail(1);
  try {
    world.share(kBase);
    expect(false, "an export that fails is refused");
  } catch (const std::runtime_error& error) {
    expect(std::string(error.what()).find("expandable_segments") != std::string::npos, "the cure");
  }
  fail(0);
  expect(!world.knows(kBase, 1), "and leaves nothing behind");
  world.share(kBase);
  expect(world.knows(kBase, 1), "so that it can be tried again");
}

}  // namespace

int main() {
  an_address_inside_an_export_has_a_locator();
  a_second_export_makes_nothing_new();
  an_allocation_that_took_the_place_of_a_freed_one_is_told_from_it();
  an_allocation_that_overlaps_a_freed_one_is_told_from_it();
  freed_memory_is_not_exported_and_cannot_be();
  memory_that_the_driver_does_not_export_is_refused_with_the_cure();
  std::puts("6 tests passed");
  return 0;
}
