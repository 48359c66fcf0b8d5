// The network of the "host" architecture: messages between mapped memories, carried by a transport
// that may delay them and let queues overtake each other. Under the names of gpu_network.cuh.
#ifndef KERNELS_DEVICE_ARCH_HOST_NETWORK_H_
#define KERNELS_DEVICE_ARCH_HOST_NETWORK_H_

#include <cstdint>

#include "kernels/abi/deepep_internode.h"
#include "kernels/device/arch/host_base.h"

namespace deepep::arch {

// One rank's end of the network, for the length of an operation.
class Network {
 public:
  explicit Network(const DeepEpNetwork& network) : network_(network), outer_(wait_hook) {
    wait_hook = {network.transport->pause, network.transport->self};
  }
  ~Network() {
    wait_hook = outer_;
    network_.transport->finish(network_.transport->self);
  }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  char* own(int64_t offset) const { return static_cast<char*>(network_.memory) + offset; }

  // Sends bytes of this rank's memory to the same rail's rank on `node`; by a whole team. What lies
  // at `from` stays as it is until the receiver has said that it has the message.
  void put(Team, int node, int queue, int64_t to, int64_t from, int64_t bytes) const {
    const DeepEpTransport& transport = *network_.transport;
    transport.put(transport.self, queue, peer(node) + to, own(from), static_cast<uint64_t>(bytes));
  }
  // Sets a word there, behind what this team has put into the queue before: who acquires the word
  // sees that.
  void put_word(Team, int node, int queue, int64_t to, uint64_t value) const {
    const DeepEpTransport& transport = *network_.transport;
    transport.put_word(transport.self, queue, reinterpret_cast<uint64_t*>(peer(node) + to), value);
  }

 private:
  char* peer(int node) const { return static_cast<char*>(network_.rail[node]); }

  const DeepEpNetwork& network_;
  WaitHook outer_;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_HOST_NETWORK_H_
