// One rank's rounds across nodes, and what must come of them: layout, notify, dispatch, cached
// dispatch and combine of random routing, everything compared with the definition. What runs the
// ranks, and what carries their messages, is the including program's.
#ifndef TESTS_KERNELS_INTERNODE_WORLD_H_
#define TESTS_KERNELS_INTERNODE_WORLD_H_

#include <algorithm>

#include "tests/kernels/internode_numbers.h"

namespace world {

// ---- One rank

class Rank {
 public:
  Rank(const Shape& shape, Domain& domain, const DeepEpNetwork* network, uint32_t seed)
      : shape_(shape), domain_(domain), network_(network), seed_(seed) {
    me_ = network->node * shape.per_node + domain.context()->rank;
    base_ = shape.experts() / shape.ranks(), extra_ = shape.experts() % shape.ranks();
  }

  // Returns the first status that is not DEEPEP_OK; checks everything else.
  int32_t round(int number) {
    number_ = number, hidden_ = shape_.hidden(number);
    all_.clear();
    for (int r = 0; r < shape_.ranks(); ++r) all_.push_back(routing_of(shape_, r, number, seed_));
    layout();
    if (int32_t status = notify()) return status;
    for (bool fresh : {true, false}) {
      if (int32_t status = dispatch_and_combine(fresh)) return status;
    }
    return DEEPEP_OK;
  }
  // A dispatch of rows that other ranks may know as longer or shorter; of the last routing.
  int32_t dispatch_again(int hidden) {
    hidden_ = hidden;
    return dispatch_and_combine(false);
  }
  const DeepEpFault& fault() const { return domain_.fault(); }
  int rank() const { return me_; }

 private:
  const Routing& mine() const { return all_[me_]; }
  int owner(int64_t expert) const {
    const int wide = extra_ * (base_ + 1);
    return static_cast<int>(expert < wide ? expert / (base_ + 1)
                                          : extra_ + (expert - wide) / base_);
  }
  int first_expert(int rank) const { return rank * base_ + std::min(rank, extra_); }
  bool goes_to(int source, int token, int rank) const {
    for (int k = 0; k < kTopk; ++k) {
      const int64_t id = all_[source].ids[token * kTopk + k];
      if (id >= 0 && owner(id) == rank) return true;
    }
    return false;
  }
  bool goes_to_node(int source, int token, int node) const {
    for (int i = 0; i < shape_.per_node; ++i) {
      if (goes_to(source, token, node * shape_.per_node + i)) return true;
    }
    return false;
  }
  uint16_t sent(int source, int token, int column) const {
    return summand(mix(seed_, static_cast<uint32_t>(source * 64 + token),
                       static_cast<uint32_t>(column), static_cast<uint32_t>(number_)));
  }
  // What the experts of `rank` made of a token's row.
  uint16_t output(int rank, int source, int token, int column) const {
    return summand(mix(static_cast<uint32_t>(rank), static_cast<uint32_t>(source * 64 + token),
                       static_cast<uint32_t>(column), static_cast<uint32_t>(number_)));
  }

  void layout() {
    const int ranks = shape_.ranks(), nodes = shape_.nodes, tokens = mine().num_tokens;
    per_rank_.assign(ranks, -1), per_node_.assign(nodes, -1);
    per_expert_.assign(shape_.experts(), -1);
    in_rank_.assign(static_cast<size_t>(tokens) * ranks, 7);
    DeepEpInternodeLayoutArgs args{};
    args.struct_size = sizeof(args), args.num_nodes = nodes;
    args.ranks_per_node = shape_.per_node, args.num_experts = shape_.experts();
    args.num_tokens = tokens, args.num_topk = kTopk, args.idx_bytes = 8;
    args.topk_idx = mine().ids.data(), args.num_tokens_per_rank = per_rank_.data();
    args.num_tokens_per_node = per_node_.data(), args.num_tokens_per_expert = per_expert_.data();
    args.is_token_in_rank = in_rank_.data();
    expect(deepep_internode_layout(&args) == DEEPEP_OK, "layout");
    for (int t = 0; t < tokens; ++t) {
      for (int r = 0; r < ranks; ++r) {
        expect(in_rank_[t * ranks + r] == goes_to(me_, t, r), "is_token_in_rank");
      }
    }
    for (int n = 0; n < nodes; ++n) {
      int count = 0;
      for (int t = 0; t < tokens; ++t) count += goes_to_node(me_, t, n);
      expect(per_node_[n] == count, "num_tokens_per_node");
    }
  }

  int32_t notify() {
    const size_t tokens = static_cast<size_t>(mine().num_tokens), ranks = shape_.ranks();
    prefix_.assign(ranks, -1), send_row_.assign(tokens * ranks, -7);
    node_row_.assign(tokens * shape_.nodes, -7);
    first_.assign(ranks, -7), forwarded_.assign(shape_.nodes, -7);
    recv_per_expert_.assign(shape_.experts(), -1);
    DeepEpInternodeNotifyArgs args{};
    args.struct_size = sizeof(args), args.context = domain_.context(), args.network = network_;
    args.num_tokens = mine().num_tokens, args.num_experts = shape_.experts();
    args.num_tokens_per_rank = per_rank_.data(), args.num_tokens_per_node = per_node_.data();
    args.num_tokens_per_expert = per_expert_.data(), args.is_token_in_rank = in_rank_.data();
    args.recv_prefix = prefix_.data(), args.send_row = send_row_.data();
    args.node_row = node_row_.data(), args.forward_first = first_.data();
    args.forward_prefix = forwarded_.data(), args.num_recv_per_expert = recv_per_expert_.data();
    args.counts = domain_.counts(), args.ticket = static_cast<uint64_t>(number_) + 1;
    if (int32_t status = deepep_internode_notify(&args)) return status;
    num_recv_ = domain_.counts()->num_recv_tokens;
    int rows = 0, forwarded = 0;
    for (int source = 0; source < shape_.ranks(); ++source) {
      const bool on_rail = source % shape_.per_node == me_ % shape_.per_node;
      const bool elsewhere = source / shape_.per_node != network_->node;
      for (int t = 0; t < all_[source].num_tokens; ++t) {
        rows += goes_to(source, t, me_);
        forwarded += on_rail && elsewhere && goes_to_node(source, t, network_->node);
      }
      expect(prefix_[source] == rows, "recv_prefix");
    }
    expect(num_recv_ == rows, "num_recv_tokens");
    expect(domain_.counts()->num_forward_tokens == forwarded, "num_forward_tokens");
    for (int e = 0; e < base_ + (me_ < extra_); ++e) {
      int count = 0;
      for (const Routing& routing : all_) {
        count += static_cast<int>(
            std::count(routing.ids.begin(), routing.ids.end(), first_expert(me_) + e));
      }
      expect(recv_per_expert_[e] == count, "num_recv_per_expert");
    }
    forward_row_.assign(static_cast<size_t>(forwarded) * shape_.per_node, -7);
    forward_token_.assign(forwarded, -7);
    return DEEPEP_OK;
  }

  int32_t dispatch_and_combine(bool fresh);
  void check_received(bool fresh, const uint16_t* x, const int64_t* ids, const float* weights,
                      const int32_t* src) const;
  int32_t combine(Tensor<uint16_t>& x, Tensor<float>& weights, bool with_weights);
  void check_combined(const std::vector<uint16_t>& out, const std::vector<float>& weights,
                      bool with_weights, const uint16_t* bias) const;

  const Shape shape_;
  Domain& domain_;
  const DeepEpNetwork* network_;
  const uint32_t seed_;
  int me_, base_, extra_, number_ = 0, hidden_ = 0, num_recv_ = 0;
  std::vector<Routing> all_;
  std::vector<int32_t> per_rank_, per_node_, per_expert_, prefix_, send_row_, node_row_, first_;
  std::vector<int32_t> forwarded_, recv_per_expert_, forward_row_, forward_token_;
  std::vector<uint8_t> in_rank_;
};

// With the top-k tensors, or as a cached handle without them; then the combine of it.
inline int32_t Rank::dispatch_and_combine(bool fresh) {
  const int tokens = mine().num_tokens;
  std::vector<uint16_t> x(static_cast<size_t>(tokens) * hidden_);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < hidden_; ++c) x[t * hidden_ + c] = sent(me_, t, c);
  }
  const size_t rows = static_cast<size_t>(num_recv_);
  Tensor<uint16_t> recv_x(domain_, rows * hidden_);
  Tensor<int64_t> ids(domain_, rows * kTopk);
  Tensor<float> weights(domain_, rows * kTopk);
  Tensor<int32_t> src(domain_, rows);
  DeepEpInternodeDispatchArgs args{};
  args.struct_size = sizeof(args), args.context = domain_.context(), args.network = network_;
  args.num_tokens = tokens, args.hidden = hidden_, args.idx_bytes = 8, args.x = x.data();
  args.num_topk = fresh ? kTopk : 0, args.num_experts = fresh ? shape_.experts() : 0;
  args.topk_idx = mine().ids.data(), args.topk_weights = mine().weights.data();
  args.recv_prefix = prefix_.data(), args.send_row = send_row_.data();
  args.node_row = node_row_.data(), args.forward_first = first_.data();
  args.forward_prefix = forwarded_.data(), args.recv_capacity = num_recv_;
  args.forward_capacity = static_cast<int32_t>(forward_token_.size());
  static int32_t nowhere;
  if (fresh) {
    args.forward_row = forward_row_.empty() ? &nowhere : forward_row_.data();
    args.forward_token = forward_token_.empty() ? &nowhere : forward_token_.data();
  }
  args.recv_x = recv_x.data(), args.at_x = recv_x.at(), args.at_x_scales = DEEPEP_NO_LOCATOR;
  args.recv_topk_idx = ids.data(), args.at_topk_idx = ids.at();
  args.recv_topk_weights = weights.data(), args.at_topk_weights = weights.at();
  args.recv_src_idx = src.data(), args.at_src_idx = fresh ? src.at() : DEEPEP_NO_LOCATOR;
  if (int32_t status = deepep_internode_dispatch(&args)) return status;
  check_received(fresh, recv_x.data(), ids.data(), weights.data(), src.data());
  return combine(recv_x, weights, fresh);
}

inline void Rank::check_received(bool fresh, const uint16_t* x, const int64_t* ids,
                                 const float* weights, const int32_t* src) const {
  size_t row = 0;
  for (int source = 0; source < shape_.ranks(); ++source) {
    for (int t = 0; t < all_[source].num_tokens; ++t) {
      if (!goes_to(source, t, me_)) continue;
      for (int c = 0; c < hidden_; ++c) {
        expect(x[row * hidden_ + c] == sent(source, t, c), "received row");
      }
      for (int k = 0; fresh && k < kTopk; ++k) {
        const int64_t id = all_[source].ids[t * kTopk + k];
        const bool here = id >= 0 && owner(id) == me_;
        expect(ids[row * kTopk + k] == (here ? id - first_expert(me_) : -1), "id");
        expect(weights[row * kTopk + k] == (here ? all_[source].weights[t * kTopk + k] : 0.0f),
               "weight");
      }
      if (fresh) expect(src[row] == t, "source index");
      ++row;
    }
  }
}

inline int32_t Rank::combine(Tensor<uint16_t>& x, Tensor<float>& weights, bool with_weights) {
  size_t row = 0;
  for (int source = 0; source < shape_.ranks(); ++source) {
    for (int t = 0; t < all_[source].num_tokens; ++t) {
      if (!goes_to(source, t, me_)) continue;
      for (int c = 0; c < hidden_; ++c) x.data()[row * hidden_ + c] = output(me_, source, t, c);
      ++row;
    }
  }
  const size_t tokens = static_cast<size_t>(mine().num_tokens);
  std::vector<uint16_t> out(tokens * hidden_, 0x7fc0), bias(tokens * hidden_);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = summand(mix(7, seed_, uint32_t(i), 3));
  std::vector<float> out_weights(tokens * kTopk, -1.0f);
  DeepEpInternodeCombineArgs args{};
  args.struct_size = sizeof(args), args.context = domain_.context(), args.network = network_;
  args.num_tokens = mine().num_tokens, args.num_recv = num_recv_, args.hidden = hidden_;
  args.num_topk = with_weights ? kTopk : 0;
  args.x = x.data(), args.x_exported = x.data(), args.at_x = x.at();
  args.at_topk_weights = DEEPEP_NO_LOCATOR;
  if (with_weights) {
    args.topk_weights = weights.data(), args.topk_weights_exported = weights.data();
    args.at_topk_weights = weights.at();
  }
  args.bias_0 = number_ % 2 == 0 ? bias.data() : nullptr;
  args.send_row = send_row_.data(), args.node_row = node_row_.data();
  args.forward_prefix = forwarded_.data(), args.forward_row = forward_row_.data();
  args.forward_token = forward_token_.data();
  args.combined_x = out.data(), args.combined_topk_weights = out_weights.data();
  if (int32_t status = deepep_internode_combine(&args)) return status;
  check_combined(out, out_weights, with_weights, number_ % 2 == 0 ? bias.data() : nullptr);
  return DEEPEP_OK;
}

inline void Rank::check_combined(const std::vector<uint16_t>& out, const std::vector<float>& weights,
                                 bool with_weights, const uint16_t* bias) const {
  for (int t = 0; t < mine().num_tokens; ++t) {
    for (int c = 0; c < hidden_; ++c) {
      float total = 0.0f;
      if (bias != nullptr) total += widen(bias[t * hidden_ + c]);
      for (int node = 0; node < shape_.nodes; ++node) {
        if (!goes_to_node(me_, t, node)) continue;
        float sum = 0.0f;
        for (int i = 0; i < shape_.per_node; ++i) {
          const int rank = node * shape_.per_node + i;
          if (goes_to(me_, t, rank)) sum += widen(output(rank, me_, t, c));
        }
        total += widen(round_to_bf16(sum));
      }
      expect(out[t * hidden_ + c] == round_to_bf16(total), "sum of rows");
    }
    for (int k = 0; with_weights && k < kTopk; ++k) {
      const bool chosen = mine().ids[t * kTopk + k] >= 0;
      expect(weights[t * kTopk + k] == (chosen ? mine().weights[t * kTopk + k] : 0.0f),
             "sum of weights");
    }
  }
}

// Domains of all ranks, connected inside their nodes; every pool has a segment that all have open, so
// that nothing waits for a service thread later.
inline std::vector<std::unique_ptr<Domain>> make_domains(const Shape& shape, uint64_t timeout_ns) {
  std::vector<std::unique_ptr<Domain>> domains;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    domains.push_back(std::make_unique<Domain>(rank % shape.per_node, shape.per_node));
    domains.back()->set_timeout(timeout_ns);
  }
  for (int node = 0; node < shape.nodes; ++node) {
    const int first = node * shape.per_node;
    std::vector<std::string> descriptions;
    for (int i = 0; i < shape.per_node; ++i) descriptions.push_back(domains[first + i]->describe());
    for (int i = 0; i < shape.per_node; ++i) domains[first + i]->connect(descriptions);
  }
  for (auto& domain : domains) {
    const Pool::Piece piece = domain->pool()->allocate(1);
    expect(domain->await_opened(domain->pool()->locate(piece.data, 1), DEEPEP_OP_DISPATCH) ==
               DEEPEP_OK,
           "opening of a segment");
    domain->pool()->release(piece);
  }
  return domains;
}

}  // namespace world

#endif  // TESTS_KERNELS_INTERNODE_WORLD_H_
