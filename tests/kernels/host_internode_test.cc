// The protocol across nodes with its ranks as threads of this program, on a network that is instant
// or late: every row and every sum compared with the definition. Built with ThreadSanitizer and
// AddressSanitizer, which see all of it.
//
// usage: host_internode_test [nodes [ranks of a node [rounds [seed]]]]
#include <thread>

#include "kernels/runtime/network.h"
#include "tests/kernels/internode_world.h"

void world::give_up(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::_Exit(1);
}

int main(int argc, char** argv) {
  const auto number = [&](int at, int otherwise) {
    return argc > at ? std::atoi(argv[at]) : otherwise;
  };
  const int rounds = number(3, 8), seed = number(4, 1);
  for (const bool late : {false, true}) {
    const world::Shape shape{number(1, 3), number(2, 2), 2, late ? 1 : 3, rounds};
    auto domains = world::make_domains(shape, 60ull * 1000000000ull);
    std::vector<std::unique_ptr<deepep::Network>> networks;
    for (int rank = 0; rank < shape.ranks(); ++rank) {
      networks.push_back(std::make_unique<deepep::Network>(
          rank / shape.per_node, shape.nodes, rank % shape.per_node, shape.per_node, shape.channels,
          static_cast<size_t>(shape.network_bytes()), late ? seed * 100 + rank : 0));
    }
    for (int rank = 0; rank < shape.ranks(); ++rank) {
      std::vector<std::string> rail;
      for (int node = 0; node < shape.nodes; ++node) {
        rail.push_back(networks[node * shape.per_node + rank % shape.per_node]->describe());
      }
      networks[rank]->connect(rail);
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < shape.ranks(); ++rank) {
      threads.emplace_back([&, rank] {
        world::Rank worker(shape, *domains[rank], networks[rank]->facts(),
                           static_cast<uint32_t>(seed));
        for (int round = 0; round < rounds; ++round) {
          world::expect(worker.round(round) == DEEPEP_OK, "a round");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%s, %s network: %d rounds, all rows and sums as defined\n", shape.text().c_str(),
                late ? "late" : "instant", rounds);
  }
  return 0;
}
