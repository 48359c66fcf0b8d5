// The protocol across nodes under simulated schedules: all ranks are fibers of this one thread, time
// stands still between steps, and a seed decides who runs next and which message arrives. A message
// is read when it arrives, not when it is sent, so that memory which is used again too soon shows.
// What fails with a seed fails with it every time.
//
// usage: internode_schedules_test [--schedules N] [--seed FIRST] [--break NOTHING|ORDER] [--story S]
// Stories: rounds (default), dead (a node never comes), shapes (nodes disagree about rows).
#include <ucontext.h>

#include <deque>
#include <functional>
#include <map>

#include "kernels/device/arch/host_base.h"
#include "tests/kernels/internode_world.h"

namespace {

constexpr uint64_t kStepNs = 1000, kTimeoutNs = 400000000;  // 400000 steps without progress
constexpr size_t kStackBytes = 256 << 10;

uint64_t now = 0;
std::string story = "rounds", breaking = "NOTHING", scene;  // scene: what to say when it fails

struct Message {
  void* to;
  const void* from;  // NULL: a word
  uint64_t bytes, word;
};

// All ranks, all messages, and the dice.
class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) {
    hurry_ = 1 + dice(8);       // how readily messages arrive
    slow_queue_ = dice(64);     // queues with this number, modulo 64, are starved
    slow_fiber_ = dice(2) ? dice(8) : ~0u;
    breathe_ = 1 + dice(6);     // how often a rank is interrupted when it sends
  }

  uint32_t dice(uint32_t sides) { return static_cast<uint32_t>(random_() % sides); }

  // ---- Ranks

  void add(std::function<void()> body) {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers_.back();
    fiber.body = std::move(body);
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &main_;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Simulation::enter), 0);
  }

  void run() {
    current_simulation = this;
    for (size_t left = fibers_.size(); left > 0;) {
      now += kStepNs;
      if (!busy_.empty() && dice(8) < hurry_) {
        deliver_one();
        continue;
      }
      const uint32_t chosen = dice(static_cast<uint32_t>(fibers_.size()));
      if (chosen == slow_fiber_ && dice(16) != 0) continue;
      Fiber& fiber = *fibers_[chosen];
      if (fiber.done) continue;
      running_ = &fiber;
      deepep::arch::wait_hook = fiber.hook;
      swapcontext(&main_, &fiber.context);
      if (fiber.done) --left;
    }
    while (!busy_.empty()) deliver_one();
  }

  // Lets others run; called in the waits of a rank.
  void yield() {
    Fiber* fiber = running_;
    fiber->hook = deepep::arch::wait_hook;
    swapcontext(&fiber->context, &main_);
    deepep::arch::wait_hook = fiber->hook;
  }

  // ---- Messages

  void send(uint64_t queue, const Message& message) {
    std::deque<Message>& waiting = queues_[queue];
    if (waiting.empty()) busy_.push_back(queue);
    waiting.push_back(message);
    if (dice(breathe_) == 0) yield();
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::function<void()> body;
    deepep::arch::WaitHook hook;
    bool done = false;
  };

  static void enter() {
    Simulation* simulation = current_simulation;
    simulation->running_->body();
    simulation->running_->done = true;
  }

  void deliver_one() {
    const uint32_t at = dice(static_cast<uint32_t>(busy_.size()));
    const uint64_t queue = busy_[at];
    if (queue % 64 == slow_queue_ && dice(16) != 0) return;
    std::deque<Message>& waiting = queues_[queue];
    size_t which = 0;
    if (breaking == "ORDER") which = dice(static_cast<uint32_t>(waiting.size()));
    const Message message = waiting[which];
    waiting.erase(waiting.begin() + static_cast<long>(which));
    if (waiting.empty()) busy_.erase(busy_.begin() + at);
    if (message.from != nullptr) {
      std::memcpy(message.to, message.from, message.bytes);
    } else {
      __atomic_store_n(static_cast<uint64_t*>(message.to), message.word, __ATOMIC_RELEASE);
    }
  }

  static Simulation* current_simulation;
  std::mt19937_64 random_;
  uint32_t hurry_, slow_queue_, slow_fiber_, breathe_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* running_ = nullptr;
  ucontext_t main_;
  std::map<uint64_t, std::deque<Message>> queues_;
  std::vector<uint64_t> busy_;  // queues with something in them
};

Simulation* Simulation::current_simulation = nullptr;

// One rank's end of the simulated network.
struct End {
  Simulation* simulation;
  uint64_t rank;
  std::vector<char> memory;
  std::vector<void*> rail;
  DeepEpTransport transport{};
  DeepEpNetwork network{};

  char* base() {  // aligned as the real ones are
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (256 - at % 256) % 256;
  }
  void connect() {
    transport.self = this;
    transport.put = [](void* self, int32_t queue, void* to, const void* from, uint64_t bytes) {
      auto* me = static_cast<End*>(self);
      me->simulation->send(me->rank << 32 | static_cast<uint32_t>(queue), {to, from, bytes, 0});
    };
    transport.put_word = [](void* self, int32_t queue, uint64_t* to, uint64_t value) {
      auto* me = static_cast<End*>(self);
      me->simulation->send(me->rank << 32 | static_cast<uint32_t>(queue), {to, nullptr, 8, value});
    };
    transport.pause = [](void* self) {
      static_cast<End*>(self)->simulation->yield();
      return int32_t{1};
    };
    transport.finish = [](void*) {};  // what is on its way arrives when it likes
    network.struct_size = sizeof(network);
    network.memory = base(), network.rail = rail.data(), network.transport = &transport;
  }
};

// What a seed plays with. Every 200th is of many ranks.
world::Shape shape_of(uint64_t seed) {
  static const int kShapes[][2] = {{2, 1}, {2, 2}, {2, 4}, {3, 2}, {4, 2}, {2, 8}, {8, 2}};
  static const int kSlots[] = {1, 2, 3, 8};
  std::mt19937_64 random(seed * 31 + 7);
  world::Shape shape{16, 4, 2, 2, 1};
  if (seed % 200 != 199) {
    const auto& pair = kShapes[random() % 7];
    shape = {pair[0], pair[1], 1 + static_cast<int>(random() % 4), kSlots[random() % 4], 2};
  }
  return shape;
}

void check_fault(const world::Rank& rank, const world::Shape& shape, int32_t status, bool dead) {
  const DeepEpFault& fault = rank.fault();
  if (dead) {
    world::expect(status == DEEPEP_TIMEOUT, "a rank of a living node does not time out");
    const uint64_t last = uint64_t{1} << (shape.nodes - 1);
    world::expect(fault.nodes == last || (fault.nodes == 0 && fault.peers != 0),
                  "the missing node is not named");
    return;
  }
  world::expect(status == DEEPEP_MISMATCH || status == DEEPEP_TIMEOUT, "no fault is seen");
}

void play(uint64_t seed) {
  const world::Shape shape = shape_of(seed);
  scene = "schedule " + std::to_string(seed) + " (" + shape.text() + "); again by: --story " +
          story + " --schedules 1 --seed " + std::to_string(seed);
  now = 0;
  auto domains = world::make_domains(shape, kTimeoutNs);
  Simulation simulation(seed);
  const auto bytes = static_cast<size_t>(shape.network_bytes());
  std::vector<std::unique_ptr<End>> ends;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    ends.push_back(std::make_unique<End>());
    End& end = *ends.back();
    end.simulation = &simulation, end.rank = static_cast<uint64_t>(rank);
    end.memory.assign(bytes + 256, 0), end.rail.resize(shape.nodes);
    end.connect();
    end.network.node = rank / shape.per_node, end.network.num_nodes = shape.nodes;
    end.network.num_channels = shape.channels, end.network.bytes = bytes;
    end.network.ranks_per_node = shape.per_node, end.network.local_rank = rank % shape.per_node;
  }
  int mismatches = 0;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    for (int node = 0; node < shape.nodes; ++node) {
      ends[rank]->rail[node] = ends[node * shape.per_node + rank % shape.per_node]->base();
    }
    simulation.add([&, rank] {
      world::Rank worker(shape, *domains[rank], &ends[rank]->network, static_cast<uint32_t>(seed));
      const bool last_node = rank / shape.per_node == shape.nodes - 1;
      if (story == "dead" && last_node) return;
      for (int round = 0; round < (story == "shapes" ? 1 : shape.rounds); ++round) {
        const int32_t status = worker.round(round);
        if (story == "dead") return check_fault(worker, shape, status, true);
        world::expect(status == DEEPEP_OK, "a round ends with a fault");
      }
      if (story != "shapes") return;
      const int32_t status = worker.dispatch_again(last_node ? 24 : 16);
      check_fault(worker, shape, status, false);
      mismatches += status == DEEPEP_MISMATCH;
    });
  }
  simulation.run();
  if (story == "shapes") world::expect(mismatches > 0, "nobody says that the rows differ");
}

}  // namespace

uint64_t deepep_simulated_now_ns() { return now; }

void world::give_up(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s: %s\n", scene.c_str(), what.c_str());
  std::_Exit(1);
}

int main(int argc, char** argv) {
  uint64_t schedules = 200, first = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--schedules") schedules = std::strtoull(argv[i + 1], nullptr, 10);
    if (flag == "--seed") first = std::strtoull(argv[i + 1], nullptr, 10);
    if (flag == "--break") breaking = argv[i + 1];
    if (flag == "--story") story = argv[i + 1];
  }
  for (uint64_t seed = first; seed < first + schedules; ++seed) play(seed);
  std::printf("%s: schedules %llu to %llu, all as defined\n", story.c_str(),
              static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + schedules - 1));
  return 0;
}
