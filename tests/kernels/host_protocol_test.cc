// The whole host protocol, ranks as threads of this program: notify, dispatch, cached dispatch and
// combine over many rounds of random routing, every received row and every sum compared with the
// definition. Built with ThreadSanitizer and AddressSanitizer, which see all of it.
//
// usage: host_protocol_test [ranks [rounds [seed]]]
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/runtime/domain.h"

namespace {

using deepep::Domain;
using deepep::Pool;

constexpr int kHidden = 64, kTopk = 3, kExperts = 10;
constexpr int kGuard = 64;  // rows' neighbours in the pool that nobody may touch

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s: %s\n", what.c_str(), deepep_last_error());
  std::_Exit(1);
}
void expect(bool condition, const std::string& what) {
  if (!condition) give_up(what);
}

// Small integers are exact in BF16, and so are their sums here.
uint16_t bf16(int value) {
  const float number = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}
int element(int rank, int token, int column) { return (rank * 37 + token * 5 + column) % 31; }

// A tensor in exported memory, with guard bytes behind it.
template <class T>
class Tensor {
 public:
  Tensor(Domain& domain, size_t count)
      : pool_(domain.pool()), count_(count), piece_(pool_->allocate(count * sizeof(T) + kGuard)) {
    std::memset(piece_.data, 0xa5, count * sizeof(T) + kGuard);
  }
  ~Tensor() {
    const auto* guard = reinterpret_cast<unsigned char*>(piece_.data + count_ * sizeof(T));
    for (int i = 0; i < kGuard; ++i) expect(guard[i] == 0xa5, "guard byte overwritten");
    pool_->release(piece_);
  }
  T* data() const { return reinterpret_cast<T*>(piece_.data); }
  DeepEpLocator at() const { return pool_->locate(data(), count_ * sizeof(T)); }

 private:
  std::shared_ptr<Pool> pool_;
  size_t count_;
  Pool::Piece piece_;
};

struct Routing {
  int num_tokens;
  std::vector<int64_t> ids;
  std::vector<float> weights;
};

// The same on every rank that asks, so that each can tell what the others sent.
Routing routing_of(int rank, int round, int seed) {
  std::mt19937 random(static_cast<uint32_t>(seed * 1000003 + round * 131 + rank));
  Routing routing;
  routing.num_tokens = round % 5 == 4 && rank % 2 == 1 ? 0 : static_cast<int>(random() % 24);
  for (int i = 0; i < routing.num_tokens * kTopk; ++i) {
    routing.ids.push_back(static_cast<int64_t>(random() % (kExperts + 1)) - 1);
    routing.weights.push_back(static_cast<float>(random() % 16));
  }
  return routing;
}

class Rank {
 public:
  Rank(Domain& domain, int seed) : domain_(domain), seed_(seed) {
    rank_ = domain.context()->rank;
    ranks_ = domain.context()->num_ranks;
    base_ = kExperts / ranks_, extra_ = kExperts % ranks_;
  }

  void round(int number) {
    number_ = number;
    mine_ = routing_of(rank_, number, seed_);
    std::mt19937 random(static_cast<uint32_t>(number * 7919 + rank_));
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    layout();
    notify();
    dispatch(true);
    dispatch(false);
  }

 private:
  int owner(int64_t expert) const {
    const int wide = extra_ * (base_ + 1);
    return static_cast<int>(expert < wide ? expert / (base_ + 1)
                                          : extra_ + (expert - wide) / base_);
  }
  int first_expert(int rank) const { return rank * base_ + (rank < extra_ ? rank : extra_); }
  bool goes_to(const Routing& routing, int token, int rank) const {
    for (int k = 0; k < kTopk; ++k) {
      const int64_t id = routing.ids[token * kTopk + k];
      if (id >= 0 && owner(id) == rank) return true;
    }
    return false;
  }

  void layout() {
    per_rank_.assign(ranks_, -1), per_expert_.assign(kExperts, -1);
    in_rank_.assign(static_cast<size_t>(mine_.num_tokens) * ranks_, 7);
    DeepEpLayoutArgs args{};
    args.struct_size = sizeof(args);
    args.num_ranks = ranks_, args.num_experts = kExperts;
    args.num_tokens = mine_.num_tokens, args.num_topk = kTopk, args.idx_bytes = 8;
    args.topk_idx = mine_.ids.data();
    args.num_tokens_per_rank = per_rank_.data(), args.num_tokens_per_expert = per_expert_.data();
    args.is_token_in_rank = in_rank_.data();
    expect(deepep_layout(&args) == DEEPEP_OK, "layout");
  }

  void notify() {
    prefix_.assign(static_cast<size_t>(ranks_) * ranks_, -1);
    send_row_.assign(static_cast<size_t>(mine_.num_tokens) * ranks_, -7);
    recv_per_expert_.assign(kExperts, -1);
    DeepEpNotifyArgs args{};
    args.struct_size = sizeof(args), args.context = domain_.context();
    args.num_tokens = mine_.num_tokens, args.num_experts = kExperts;
    args.num_tokens_per_rank = per_rank_.data(), args.num_tokens_per_expert = per_expert_.data();
    args.is_token_in_rank = in_rank_.data(), args.rank_prefix = prefix_.data();
    args.send_row = send_row_.data(), args.num_recv_per_expert = recv_per_expert_.data();
    args.counts = domain_.counts(), args.ticket = static_cast<uint64_t>(number_) + 1;
    expect(deepep_notify(&args) == DEEPEP_OK, "notify");
    num_recv_ = domain_.counts()->num_recv_tokens;
  }

  // With the top-k tensors, or as a cached handle without them; then the combine of it.
  void dispatch(bool fresh) {
    std::vector<uint16_t> x(static_cast<size_t>(mine_.num_tokens) * kHidden);
    for (int t = 0; t < mine_.num_tokens; ++t) {
      for (int c = 0; c < kHidden; ++c) x[t * kHidden + c] = bf16(element(rank_, t, c));
    }
    const size_t rows = static_cast<size_t>(num_recv_);
    Tensor<uint16_t> recv_x(domain_, rows * kHidden);
    Tensor<int64_t> recv_ids(domain_, rows * kTopk);
    Tensor<float> recv_weights(domain_, rows * kTopk);
    Tensor<int32_t> recv_src(domain_, rows);
    DeepEpDispatchArgs args{};
    args.struct_size = sizeof(args), args.context = domain_.context();
    args.num_tokens = mine_.num_tokens, args.hidden = kHidden;
    args.num_topk = fresh ? kTopk : 0, args.num_experts = fresh ? kExperts : 0;
    args.idx_bytes = 8, args.x = x.data();
    args.topk_idx = mine_.ids.data(), args.topk_weights = mine_.weights.data();
    args.send_row = send_row_.data(), args.rank_prefix = prefix_.data();
    args.recv_capacity = num_recv_;
    args.recv_x = recv_x.data(), args.at_x = recv_x.at();
    args.at_x_scales = DEEPEP_NO_LOCATOR;
    args.recv_topk_idx = recv_ids.data(), args.at_topk_idx = recv_ids.at();
    args.recv_topk_weights = recv_weights.data(), args.at_topk_weights = recv_weights.at();
    args.recv_src_idx = recv_src.data();
    args.at_src_idx = fresh ? recv_src.at() : DEEPEP_NO_LOCATOR;
    expect(domain_.await_opened(recv_src.at(), DEEPEP_OP_DISPATCH) == DEEPEP_OK, "open");
    expect(domain_.await_opened(args.at_x, DEEPEP_OP_DISPATCH) == DEEPEP_OK, "open");
    expect(deepep_dispatch(&args) == DEEPEP_OK, "dispatch");
    check_received(fresh, recv_x, recv_ids, recv_weights, recv_src);
    combine(recv_x, fresh ? &recv_weights : nullptr);
  }

  void check_received(bool fresh, const Tensor<uint16_t>& x, const Tensor<int64_t>& ids,
                      const Tensor<float>& weights, const Tensor<int32_t>& src) {
    size_t row = 0;
    for (int source = 0; source < ranks_; ++source) {
      const Routing theirs = routing_of(source, number_, seed_);
      for (int t = 0; t < theirs.num_tokens; ++t) {
        if (!goes_to(theirs, t, rank_)) continue;
        for (int c = 0; c < kHidden; ++c) {
          expect(x.data()[row * kHidden + c] == bf16(element(source, t, c)), "received row");
        }
        for (int k = 0; fresh && k < kTopk; ++k) {
          const int64_t id = theirs.ids[t * kTopk + k];
          const bool here = id >= 0 && owner(id) == rank_;
          expect(ids.data()[row * kTopk + k] == (here ? id - first_expert(rank_) : -1), "id");
          expect(weights.data()[row * kTopk + k] == (here ? theirs.weights[t * kTopk + k] : 0.0f),
                 "weight");
        }
        if (fresh) expect(src.data()[row] == t, "source index");
        ++row;
      }
    }
    expect(row == static_cast<size_t>(num_recv_), "number of rows");
  }

  void combine(const Tensor<uint16_t>& x, const Tensor<float>* weights) {
    const size_t count = static_cast<size_t>(mine_.num_tokens);
    std::vector<uint16_t> out(count * kHidden, 0x7fc0), bias(count * kHidden, bf16(2));
    std::vector<float> out_weights(count * kTopk, -1.0f);
    DeepEpCombineArgs args{};
    args.struct_size = sizeof(args), args.context = domain_.context();
    args.num_tokens = mine_.num_tokens, args.num_recv = num_recv_, args.hidden = kHidden;
    args.num_topk = weights != nullptr ? kTopk : 0;
    args.x = x.data(), args.x_exported = x.data(), args.at_x = x.at();
    args.at_topk_weights = DEEPEP_NO_LOCATOR;
    if (weights != nullptr) {
      args.topk_weights = weights->data(), args.topk_weights_exported = weights->data();
      args.at_topk_weights = weights->at();
    }
    args.bias_0 = number_ % 2 == 0 ? bias.data() : nullptr;
    args.send_row = send_row_.data();
    args.combined_x = out.data(), args.combined_topk_weights = out_weights.data();
    expect(deepep_combine(&args) == DEEPEP_OK, "combine");
    for (int t = 0; t < mine_.num_tokens; ++t) {
      int copies = 0;
      for (int rank = 0; rank < ranks_; ++rank) copies += goes_to(mine_, t, rank);
      for (int c = 0; c < kHidden; ++c) {
        const int sum = copies * element(rank_, t, c) + (args.bias_0 != nullptr ? 2 : 0);
        expect(out[t * kHidden + c] == bf16(sum), "sum of rows");
      }
      for (int k = 0; weights != nullptr && k < kTopk; ++k) {
        const bool chosen = mine_.ids[t * kTopk + k] >= 0;
        expect(out_weights[t * kTopk + k] == (chosen ? mine_.weights[t * kTopk + k] : 0.0f),
               "sum of weights");
      }
    }
  }

  Domain& domain_;
  int seed_, rank_, ranks_, base_, extra_, number_ = 0, num_recv_ = 0;
  Routing mine_;
  std::vector<int32_t> per_rank_, per_expert_, prefix_, send_row_, recv_per_expert_;
  std::vector<uint8_t> in_rank_;
};

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 30;
  const int seed = argc > 3 ? std::atoi(argv[3]) : 1;
  std::vector<std::unique_ptr<Domain>> domains;
  std::vector<std::string> descriptions;
  for (int rank = 0; rank < ranks; ++rank) {
    domains.push_back(std::make_unique<Domain>(rank, ranks));
    domains.back()->set_timeout(20ull * 1000000000ull);
    descriptions.push_back(domains.back()->describe());
  }
  for (auto& domain : domains) domain->connect(descriptions);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank worker(*domains[rank], seed);
      for (int round = 0; round < rounds; ++round) worker.round(round);
      domains[rank]->close();  // while others may still be at their last operation
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d ranks, %d rounds, seed %d: all rows and sums as defined\n", ranks, rounds, seed);
  return 0;
}
