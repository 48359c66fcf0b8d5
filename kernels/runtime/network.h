// One rank's part in a network between nodes: its network memory, the rail's memories as mapped
// here, and what carries messages. On "host" the network is shared memory, so its nodes are of one
// machine; with a seed, messages are late and overtake each other as they do on a real one.
#ifndef KERNELS_RUNTIME_NETWORK_H_
#define KERNELS_RUNTIME_NETWORK_H_

#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/abi/deepep_internode.h"
#include "kernels/runtime/memory.h"

namespace deepep {

// Carries messages of one rank, in order inside a queue.
class Transport {
 public:
  // `seed` 0: a message has arrived when it was sent.
  explicit Transport(uint64_t seed);
  void set_seed(uint64_t seed);
  const DeepEpTransport* functions() const { return &functions_; }

  void put(int32_t queue, void* to, const void* from, uint64_t bytes);
  void put_word(int32_t queue, uint64_t* to, uint64_t value);
  // Some of what is on its way arrives.
  void pause();
  // All of it does, queues in any order.
  void finish();
  // Nothing of it ever does.
  void drop() { queues_.clear(); }

  uint64_t messages = 0, bytes = 0;  // rows and counts sent so far; words are not counted

 private:
  struct Message {
    void* to;
    const void* from;  // NULL: `word` is the message
    uint64_t bytes, word;
  };
  void send(int32_t queue, const Message& message);
  static void deliver(const Message& message);
  void deliver_some();

  DeepEpTransport functions_{};
  bool delays_;
  std::mt19937_64 random_;
  std::map<int32_t, std::deque<Message>> queues_;
};

class Network {
 public:
  // Node `node` of `num_nodes` with `ranks_per_node` ranks each. `bytes` and `num_channels` must be
  // the same on all ranks.
  Network(int node, int num_nodes, int local_rank, int ranks_per_node, int num_channels,
          size_t bytes, uint64_t seed);
  // The same on a GPU: `memory` is symmetric memory that a kernel library has allocated.
  Network(int node, int num_nodes, int local_rank, int ranks_per_node, int num_channels,
          size_t bytes, void* memory);

  // On "host": what the rail's ranks need to find this one; exchanged by any means, then given in
  // node order.
  std::string describe() const;
  void connect(const std::vector<std::string>& descriptions);

  const DeepEpNetwork* facts() const { return &facts_; }
  const Transport& transport() const { return transport_; }
  // After a fault, while no operation runs on any rank and nothing is on its way from any: all
  // words are as in the beginning.
  void drop() { transport_.drop(); }
  void clear();
  // Lets go of the rail.
  void close();

 private:
  void check_room() const;

  DeepEpNetwork facts_{};
  Transport transport_;
  std::vector<std::shared_ptr<Memory>> memories_;  // [node]
  std::vector<void*> rail_;
};

}  // namespace deepep

#endif  // KERNELS_RUNTIME_NETWORK_H_
