// The low-latency protocol on the host, ranks as threads of this program: direct and collected
// dispatch, pulled and pushed combine, at once and in halves with another operation between, in one
// random order for all ranks, every row and every sum compared with the definition. Built with
// ThreadSanitizer and AddressSanitizer, which see all of it.
//
// usage: host_lowlatency_test [ranks [rounds [seed]]]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/abi/deepep_lowlatency.h"
#include "kernels/device/lowlatency/workspace.h"
#include "kernels/runtime/domain.h"

namespace {

using deepep::Domain;
using deepep::Pool;

constexpr int kHidden = 144, kTopk = 3, kExperts = 10, kMaxTokens = 12, kScales = 2;

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s: %s\n", what.c_str(), deepep_last_error());
  std::_Exit(1);
}
void expect(bool condition, const std::string& what) {
  if (!condition) give_up(what);
}

// Integers up to 15 are exact in BF16 and in e4m3, and so are their sums here in FP32.
uint16_t bf16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}
float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 0x80 ? -value : value;
}
int element(int rank, int token, int column) { return (rank * 37 + token * 5 + column) % 15 - 7; }
int output(int expert, int rank, int token, int column) {
  return (expert * 11 + rank * 3 + token + column) % 31 - 15;
}

struct Routing {
  int num_tokens;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// The same on every rank that asks.
Routing routing_of(int rank, int round, int seed) {
  std::mt19937 random(static_cast<uint32_t>(seed * 1000003 + round * 131 + rank));
  Routing routing;
  routing.num_tokens = round % 5 == 4 && rank % 2 == 1 ? 0 : static_cast<int>(random() % 13);
  for (int i = 0; i < routing.num_tokens * kTopk; ++i) {
    routing.ids.push_back(static_cast<int32_t>(random() % (kExperts + 1)) - 1);
    routing.weights.push_back(static_cast<float>(random() % 4));
  }
  return routing;
}

// What one round does; drawn alike by all ranks.
struct Mode {
  bool direct, split, pull, cast;
};
Mode mode_of(int round, int seed) {
  std::mt19937 random(static_cast<uint32_t>(seed * 7 + round));
  const bool split = random() % 3 == 0;
  return {!split && random() % 2 == 0, split, random() % 2 == 0, random() % 2 == 0};
}

// A piece of exported memory, poisoned.
class Piece {
 public:
  Piece(Domain& domain, size_t bytes)
      : pool_(domain.pool()), bytes_(bytes), piece_(pool_->allocate(bytes)) {
    std::memset(piece_.data, 0xa5, bytes);
    expect(domain.await_opened(at(), DEEPEP_OP_LOW_LATENCY_DISPATCH) == DEEPEP_OK, "open");
  }
  ~Piece() { pool_->release(piece_); }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  char* data() const { return piece_.data; }
  DeepEpLocator at() const { return pool_->locate(piece_.data, bytes_); }

 private:
  std::shared_ptr<Pool> pool_;
  size_t bytes_;
  Pool::Piece piece_;
};

// One dispatch and the combine of it. What is sent in halves is received when somebody asks.
class Round {
 public:
  Round(Domain& domain, int number, int seed)
      : domain_(domain), number_(number), seed_(seed), mode_(mode_of(number, seed)) {
    rank_ = domain.context()->rank, ranks_ = domain.context()->num_ranks;
    base_ = kExperts / ranks_, extra_ = kExperts % ranks_;
    local_ = base_ + (rank_ < extra_ ? 1 : 0);
    first_ = rank_ * base_ + std::min(rank_, extra_);
    mine_ = routing_of(rank_, number, seed);
    rows_ = static_cast<size_t>(local_) * ranks_ * kMaxTokens;
    const size_t x_bytes = round_up(rows_ * kHidden), scale_bytes = round_up(rows_ * kScales * 4);
    recv_ = std::make_unique<Piece>(domain, x_bytes + scale_bytes + rows_ * 8 + 64);
    scales_ = reinterpret_cast<float*>(recv_->data() + x_bytes);
    sources_ = reinterpret_cast<int64_t*>(recv_->data() + x_bytes + scale_bytes);
    y_ = std::make_unique<Piece>(domain, rows_ * kHidden * 2 + 64);
  }

  void send_dispatch() {
    const size_t tokens = static_cast<size_t>(mine_.num_tokens);
    x_.resize(tokens * kHidden), bytes_.resize(tokens * kHidden), in_scales_.resize(tokens * 2);
    for (size_t t = 0; t < tokens; ++t) {
      for (int c = 0; c < kHidden; ++c) {
        const int value = element(rank_, static_cast<int>(t), c);
        x_[t * kHidden + c] = bf16(static_cast<float>(value));
        bytes_[t * kHidden + c] = static_cast<uint8_t>(value);
      }
      in_scales_[t * 2] = static_cast<float>(t), in_scales_[t * 2 + 1] = static_cast<float>(rank_);
    }
    index_.assign(tokens * kTopk, -7), counts_.assign(kExperts, -7);
    count_.assign(local_, -7), range_.assign(static_cast<size_t>(local_) * ranks_, -7);
    DeepEpLowLatencyDispatchArgs& args = dispatch_;
    args = {};
    args.struct_size = sizeof(args), args.context = domain_.context();
    args.phases = mode_.split ? DEEPEP_SEND : DEEPEP_SEND_AND_RECEIVE;
    args.direct = mode_.direct, args.at = recv_->at();
    args.cast = mode_.cast ? DEEPEP_CAST_FP8_ROUNDED : DEEPEP_CAST_NONE;
    args.num_tokens = mine_.num_tokens, args.max_tokens = kMaxTokens, args.hidden = kHidden;
    args.num_scales = kScales, args.num_topk = kTopk, args.num_experts = kExperts;
    args.idx_bytes = 4, args.topk_idx = mine_.ids.data();
    args.x = mode_.cast ? static_cast<const void*>(x_.data()) : bytes_.data();
    args.x_scales = in_scales_.data(), args.scale_token_stride = 2, args.scale_group_stride = 1;
    args.send_index = index_.data(), args.send_counts = counts_.data();
    args.recv_x = recv_->data(), args.recv_scales = scales_, args.recv_source = sources_;
    args.recv_count = count_.data(), args.layout_range = range_.data();
    expect(deepep_low_latency_dispatch(&args) == DEEPEP_OK, "dispatch");
  }
  void receive_dispatch() {
    if (mode_.split) {
      dispatch_.phases = DEEPEP_RECEIVE;
      expect(deepep_low_latency_dispatch(&dispatch_) == DEEPEP_OK, "receive of dispatch");
    }
    check_received();
  }

  void send_combine() {
    out_.assign(static_cast<size_t>(mine_.num_tokens) * kHidden, 0x7fc0);
    DeepEpLowLatencyCombineArgs& args = combine_;
    args = {};
    args.struct_size = sizeof(args), args.context = domain_.context();
    args.phases = mode_.split ? DEEPEP_SEND : DEEPEP_SEND_AND_RECEIVE;
    args.num_tokens = mine_.num_tokens, args.max_tokens = kMaxTokens, args.hidden = kHidden;
    args.num_topk = kTopk, args.num_experts = kExperts, args.idx_bytes = 4;
    args.x = y_->data(), args.at_x = mode_.pull ? y_->at() : DEEPEP_NO_LOCATOR;
    args.topk_idx = mine_.ids.data(), args.topk_weights = mine_.weights.data();
    args.send_index = index_.data(), args.recv_source = sources_;
    args.layout_range = range_.data(), args.out = out_.data();
    expect(deepep_low_latency_combine(&args) == DEEPEP_OK, "combine");
    if (mode_.split && !mode_.pull) std::memset(y_->data(), 0x5a, rows_ * kHidden * 2);
  }
  void receive_combine() {
    if (mode_.split) {
      combine_.phases = DEEPEP_RECEIVE;
      expect(deepep_low_latency_combine(&combine_) == DEEPEP_OK, "receive of combine");
    }
    if (mode_.pull) std::memset(y_->data(), 0x5a, rows_ * kHidden * 2);  // nobody reads it now
    for (int t = 0; t < mine_.num_tokens; ++t) {
      for (int c = 0; c < kHidden; ++c) {
        float sum = 0;
        for (int k = 0; k < kTopk; ++k) {
          const int i = t * kTopk + k;
          if (mine_.ids[i] < 0) continue;
          sum += mine_.weights[i] * static_cast<float>(output(mine_.ids[i], rank_, t, c));
        }
        expect(out_[t * kHidden + c] == bf16(sum), "sum of rows");
      }
    }
  }

 private:
  static size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

  // Compares what came, and writes the experts' outputs.
  void check_received() {
    const size_t room = static_cast<size_t>(ranks_) * kMaxTokens;
    auto* y = reinterpret_cast<uint16_t*>(y_->data());
    for (int e = 0; e < local_; ++e) {
      size_t row = 0;
      for (int source = 0; source < ranks_; ++source) {
        const Routing theirs = routing_of(source, number_, seed_);
        const size_t before = row;
        for (int i = 0; i < theirs.num_tokens * kTopk; ++i) {
          if (theirs.ids[i] != first_ + e) continue;
          const int t = i / kTopk;
          const size_t at = e * room + row;
          expect(sources_[at] == (t | static_cast<int64_t>(i) << 32), "source of a row");
          check_row(e, row, at, source, t);
          for (int c = 0; c < kHidden; ++c) {
            y[at * kHidden + c] = bf16(static_cast<float>(output(first_ + e, source, t, c)));
          }
          ++row;
        }
        const int64_t range = range_[static_cast<size_t>(e) * ranks_ + source];
        expect(range == static_cast<int64_t>(before << 32 | (row - before)), "range of a source");
      }
      expect(count_[e] == static_cast<int32_t>(row), "rows of an expert");
    }
  }
  void check_row(int e, size_t row, size_t at, int source, int token) {
    const size_t room = static_cast<size_t>(ranks_) * kMaxTokens;
    const float* scales = scales_ + static_cast<size_t>(e) * kScales * room + row;
    const auto* bytes = reinterpret_cast<const uint8_t*>(recv_->data()) + at * kHidden;
    for (int c = 0; c < kHidden; ++c) {
      const int value = element(source, token, c);
      if (mode_.cast) {
        expect(e4m3(bytes[c]) * scales[c / 128 * room] == static_cast<float>(value), "cast row");
      } else {
        expect(bytes[c] == static_cast<uint8_t>(value), "row");
      }
    }
    if (mode_.cast) return;
    expect(scales[0] == static_cast<float>(token), "scale");
    expect(scales[room] == static_cast<float>(source), "scale");
  }

  Domain& domain_;
  int number_, seed_, rank_, ranks_, base_, extra_, local_, first_;
  Mode mode_;
  Routing mine_;
  size_t rows_;
  std::unique_ptr<Piece> recv_, y_;
  float* scales_;
  int64_t* sources_;
  std::vector<uint16_t> x_, out_;
  std::vector<uint8_t> bytes_;
  std::vector<float> in_scales_;
  std::vector<int32_t> index_, counts_, count_;
  std::vector<int64_t> range_;
  DeepEpLowLatencyDispatchArgs dispatch_;
  DeepEpLowLatencyCombineArgs combine_;
};

// Rounds one after another, the combine of one and the dispatch of the next on their way together.
void work(Domain& domain, int rounds, int seed) {
  std::mt19937 delays(static_cast<uint32_t>(domain.context()->rank));
  const auto dawdle = [&] {
    if (delays() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(delays() % 300));
  };
  auto now = std::make_unique<Round>(domain, 0, seed);
  now->send_dispatch();
  now->receive_dispatch();
  for (int round = 1; round <= rounds; ++round) {
    auto next = std::make_unique<Round>(domain, round, seed);
    now->send_combine();
    dawdle();
    next->send_dispatch();
    if (round % 2 == 0) now->receive_combine();
    dawdle();
    next->receive_dispatch();
    if (round % 2 == 1) now->receive_combine();
    now = std::move(next);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 60;
  const int seed = argc > 3 ? std::atoi(argv[3]) : 1;
  const auto size =
      static_cast<size_t>(deepep::workspace_hint(kMaxTokens, kHidden, ranks, kExperts));
  std::vector<std::unique_ptr<Domain>> domains;
  std::vector<std::string> descriptions;
  for (int rank = 0; rank < ranks; ++rank) {
    domains.push_back(std::make_unique<Domain>(rank, ranks));
    domains.back()->set_timeout(20ull * 1000000000ull);
    descriptions.push_back(domains.back()->describe());
  }
  for (auto& domain : domains) domain->connect(descriptions);
  std::vector<Pool::Piece> workspaces;
  std::vector<DeepEpLocator> places;
  for (auto& domain : domains) {
    workspaces.push_back(domain->pool()->allocate(size));
    places.push_back(domain->pool()->locate(workspaces.back().data, size));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const auto op = DEEPEP_OP_LOW_LATENCY_DISPATCH;
    expect(domains[rank]->await_opened(places[rank], op) == DEEPEP_OK, "open");
  }
  for (auto& domain : domains) domain->set_workspaces(places, size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      work(*domains[rank], rounds, seed);
      domains[rank]->close();  // while others may still be at their last operation
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d ranks, %d rounds, seed %d: all rows and sums as defined\n", ranks, rounds, seed);
  return 0;
}
