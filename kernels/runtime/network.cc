// The network's set-up, and the transport of "host".
#include "kernels/runtime/network.h"

#include <cstring>
#include <iterator>
#include <stdexcept>

#include "kernels/device/internode/memory.h"

namespace deepep {
namespace {

Transport* self(void* pointer) { return static_cast<Transport*>(pointer); }

}  // namespace

void Transport::set_seed(uint64_t seed) {
  delays_ = seed != 0;
  random_.seed(seed);
}

Transport::Transport(uint64_t seed) {
  set_seed(seed);
  functions_.self = this;
  functions_.put = [](void* me, int32_t queue, void* to, const void* from, uint64_t bytes) {
    self(me)->put(queue, to, from, bytes);
  };
  functions_.put_word = [](void* me, int32_t queue, uint64_t* to, uint64_t value) {
    self(me)->put_word(queue, to, value);
  };
  functions_.pause = [](void* me) {
    self(me)->pause();
    return int32_t{0};
  };
  functions_.finish = [](void* me) { self(me)->finish(); };
}

void Transport::deliver(const Message& message) {
  if (message.from != nullptr) {
    std::memcpy(message.to, message.from, message.bytes);
  } else {
    // Acquired by the kernel that waits for the word; what its queue carried before is there then.
    __atomic_store_n(static_cast<uint64_t*>(message.to), message.word, __ATOMIC_RELEASE);
  }
}

void Transport::send(int32_t queue, const Message& message) {
  if (!delays_) return deliver(message);
  queues_[queue].push_back(message);
  if (random_() % 4 == 0) deliver_some();
}

void Transport::put(int32_t queue, void* to, const void* from, uint64_t bytes) {
  ++messages;
  this->bytes += bytes;
  send(queue, {to, from, bytes, 0});
}

void Transport::put_word(int32_t queue, uint64_t* to, uint64_t value) {
  send(queue, {to, nullptr, sizeof(value), value});
}

// A few messages of one queue, so that others fall behind.
void Transport::deliver_some() {
  if (queues_.empty()) return;
  const auto queue = std::next(queues_.begin(), static_cast<long>(random_() % queues_.size()));
  for (uint64_t count = 1 + random_() % 3; count > 0 && !queue->second.empty(); --count) {
    deliver(queue->second.front());
    queue->second.pop_front();
  }
  if (queue->second.empty()) queues_.erase(queue);
}

void Transport::pause() {
  if (!queues_.empty() && random_() % 2 == 0) deliver_some();
}

void Transport::finish() {
  while (!queues_.empty()) deliver_some();
}

Network::Network(int node, int num_nodes, int local_rank, int ranks_per_node, int num_channels,
                 size_t bytes, void* memory)
    : transport_(0) {
  facts_.struct_size = sizeof(facts_);
  facts_.node = node;
  facts_.num_nodes = num_nodes;
  facts_.num_channels = num_channels;
  facts_.ranks_per_node = ranks_per_node;
  facts_.local_rank = local_rank;
  facts_.memory = memory;
  facts_.bytes = bytes;
  check_room();
}

Network::Network(int node, int num_nodes, int local_rank, int ranks_per_node, int num_channels,
                 size_t bytes, uint64_t seed)
    : Network(node, num_nodes, local_rank, ranks_per_node, num_channels, bytes, nullptr) {
  transport_.set_seed(seed);
  memories_.resize(num_nodes);
  rail_.resize(num_nodes);
  memories_[node] = Memory::create(Space::kHost, bytes);
  facts_.memory = memories_[node]->data();
  facts_.rail = rail_.data();
  facts_.transport = transport_.functions();
}

void Network::check_room() const {
  const auto least = static_cast<size_t>(RailMemory(facts_.num_nodes, facts_.ranks_per_node).rings);
  if (facts_.bytes >= least) return;
  throw std::invalid_argument("network memory of " + std::to_string(facts_.bytes) +
                              " bytes has no room for rows: " + std::to_string(facts_.num_nodes) +
                              " nodes of " + std::to_string(facts_.ranks_per_node) +
                              " ranks need more than " + std::to_string(least));
}

std::string Network::describe() const {
  const MemoryHandle handle = memories_[facts_.node]->handle();
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

void Network::connect(const std::vector<std::string>& descriptions) {
  if (descriptions.size() != memories_.size()) {
    throw std::invalid_argument(std::to_string(descriptions.size()) + " descriptions for " +
                                std::to_string(memories_.size()) + " nodes");
  }
  for (int node = 0; node < facts_.num_nodes; ++node) {
    MemoryHandle handle;
    if (descriptions[node].size() != sizeof(handle)) {
      throw std::runtime_error("node " + std::to_string(node) + " runs another build of deepep");
    }
    std::memcpy(&handle, descriptions[node].data(), sizeof(handle));
    if (node != facts_.node) memories_[node] = Memory::open(handle);
    rail_[node] = memories_[node]->data();
  }
}

void Network::clear() {
  const RailMemory at(facts_.num_nodes, facts_.ranks_per_node);
  const auto words = static_cast<size_t>(at.counts_out);  // they come first
  if (facts_.rail != nullptr) {
    std::memset(facts_.memory, 0, words);
    return;
  }
  const std::vector<char> zeros(words, 0);
  cuda::write(reinterpret_cast<cuda::DevicePtr>(facts_.memory), zeros.data(), words);
}

void Network::close() {
  for (size_t node = 0; node < memories_.size(); ++node) {
    if (static_cast<int>(node) != facts_.node) memories_[node].reset();
  }
}

}  // namespace deepep
